//! The state that launches, dry runs and the pre-creation of templates share.

use std::sync::Arc;

use stowage_api::{Ec2NodeClass, NodeClaim};
use stowage_model::offering::Catalog;
use stowage_runtime::clock;

use crate::LaunchRequest;
use crate::ec2::aws::client::AwsClients;
use crate::ec2::launch::request::{LaunchInputs, Shapes, TemplateInputs};
use crate::ec2::launch::templates::recent::RecentShapes;
use crate::ec2::launch::templates::template_store::TemplateStore;
use crate::ec2::node_class::class_store::NodeClassStore;
use crate::ec2::offerings::offering_store::OfferingStore;
use crate::ec2::options::Options;
use crate::ec2::placement_group::PlacementGroup;

#[derive(Debug)]
pub struct LaunchContext {
    pub clients: AwsClients,
    pub options: Arc<Options>,
    pub offerings: Arc<OfferingStore>,
    pub node_classes: Arc<NodeClassStore>,
    pub templates: TemplateStore,
    pub recent_shapes: RecentShapes,
}

impl LaunchContext {
    pub fn new(
        clients: AwsClients,
        options: Arc<Options>,
        offerings: Arc<OfferingStore>,
        node_classes: Arc<NodeClassStore>,
    ) -> Self {
        let (templates, recent_shapes) = (TemplateStore::default(), RecentShapes::default());
        Self { clients, options, offerings, node_classes, templates, recent_shapes }
    }

    /// The current offerings for nodes of a class.
    pub fn catalog(&self, class: &Ec2NodeClass) -> Arc<Catalog> {
        self.offerings.catalog(class, self.node_classes.placement_group(class), clock::now())
    }

    /// The inputs of templates of a class in a placement group.
    pub fn template_inputs(&self, class: Arc<Ec2NodeClass>, placement_group: Option<PlacementGroup>) -> TemplateInputs {
        TemplateInputs { class, cluster: self.node_classes.cluster(), placement_group }
    }

    /// The inputs of a launch.
    pub fn launch_inputs<'a>(
        &'a self,
        request: &'a LaunchRequest,
        claim: &'a NodeClaim,
        template_inputs: &'a TemplateInputs,
        shapes: Option<Shapes<'a>>,
    ) -> LaunchInputs<'a> {
        let (region, manages_reservations) = (self.clients.region.as_str(), self.options.reserved_capacity);
        LaunchInputs { request, claim, template_inputs, region, manages_reservations, shapes }
    }
}
