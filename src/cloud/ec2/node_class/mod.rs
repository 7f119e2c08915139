//! TODO-DOC cloud::ec2::node_class

pub mod ami_alias;
pub mod capacity_reservations;
pub mod cluster_facts;
pub mod drift;
pub mod images;
pub mod instance_profiles;
pub mod placement_group;
pub mod resolve;
pub mod security_groups;
pub mod subnets;
