//! Resolution of an EC2NodeClass to subnets, security groups, images, instance profile, placement group and capacity
//! reservations; drift of instances from it; facts about the cluster that nodes join.

pub mod ami_alias;
pub mod class_drift;
pub mod class_store;
pub mod cluster_facts;
pub mod images;
pub mod instance_profiles;
pub mod resolve;
pub mod security_groups;
pub mod select_capacity_reservations;
pub mod select_placement_group;
pub mod subnets;
