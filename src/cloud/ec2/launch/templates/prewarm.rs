//! Pre-creates launch templates: the templates that the launches of the last hour would use now, with the current node class and
//! cluster.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use stowage_model::time::UnixMillis;

use crate::LaunchError;
use crate::ec2::launch::launch_context::LaunchContext;
use crate::ec2::launch::request::{Shapes, TemplateInputs};
use crate::ec2::launch::templates::recent::{LaunchShape, RecentShape};
use crate::ec2::launch::templates::spec::Template;
use crate::launch_request::launchable;

/// Maximum templates that a sweep creates: launches share their rate limit.
const MAX_CREATED: usize = 20;

#[derive(Debug)]
pub struct Prewarmer {
    context: Arc<LaunchContext>,
    /// Consecutive sweeps that failed to create a template.
    failures: AtomicUsize,
}

impl Prewarmer {
    pub fn new(context: Arc<LaunchContext>) -> Self {
        Self { context, failures: AtomicUsize::default() }
    }

    /// Creates the templates that recent launches would use now, and deletes unused templates.
    pub async fn sweep(&self, now: UnixMillis) {
        // Uses are recorded before anything is deleted, and before a call that may take long.
        let missing = self.missing_templates(now);
        self.create(missing, now).await;
        self.context.templates.delete_unused(&self.context.clients, now).await;
    }

    /// Creates templates one by one; the first failure ends the sweep.
    async fn create(&self, mut missing: Vec<Template>, now: UnixMillis) {
        let failures = self.failures.load(Ordering::Relaxed);
        // Each failure lets the next sweep begin with another template, so that an invalid template does not block the others.
        let first = failures % missing.len().max(1);
        missing.rotate_left(first);
        for template in missing.iter().take(MAX_CREATED) {
            if let Err(error) = self.context.templates.ensure(&self.context.clients, template, now).await {
                if failures == 0 {
                    let (class, name) = (&template.class, template.name());
                    tracing::warn!(class, name, %error, "failed to pre-create launch template, retrying with every sweep");
                }
                self.failures.store(failures + 1, Ordering::Relaxed);
                return;
            }
        }
        if missing.len() <= MAX_CREATED {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// The templates of recent shapes that are not known to exist in EC2; records a use of the others.
    fn missing_templates(&self, now: UnixMillis) -> Vec<Template> {
        let mut missing = BTreeMap::new();
        for mut recent in self.context.recent_shapes.take(now) {
            match self.missing_of(&mut recent, now) {
                Ok(found) => missing.extend(found.into_iter().map(|template| (template.name(), template))),
                Err(error) => {
                    let class = &recent.shape.request.node_class;
                    tracing::debug!(class, %error, "recent launch shape can no longer launch, discarded");
                    continue;
                }
            }
            self.context.recent_shapes.keep(recent);
        }
        missing.into_values().collect()
    }

    /// The missing templates of a shape. Renders them again when one of their inputs changed.
    fn missing_of(&self, recent: &mut RecentShape, now: UnixMillis) -> Result<Vec<Template>, LaunchError> {
        let is_missing = |name: &String| !self.context.templates.touch(name, now);
        let placement_group = self.context.node_classes.placement_group(&recent.class);
        let lacks_group = recent.class.spec.placement_group_selector.is_some() && placement_group.is_none();
        if lacks_group || launchable(&recent.class).is_err() {
            // Existing templates stay: they may still be current.
            for name in &recent.names {
                self.context.templates.touch(name, now);
            }
            return Ok(vec![]);
        }
        let inputs = self.context.template_inputs(Arc::clone(&recent.class), placement_group);
        if inputs.same_as(&recent.template_inputs) && recent.names.iter().filter(|name| is_missing(name)).count() == 0 {
            return Ok(vec![]);
        }
        let templates = self.templates_of(&recent.shape, &inputs)?;
        (recent.names, recent.template_inputs) = (templates.iter().map(Template::name).collect(), inputs);
        Ok(templates.into_iter().filter(|template| is_missing(&template.name())).collect())
    }

    /// The templates of a launch of this shape.
    fn templates_of(&self, shape: &LaunchShape, inputs: &TemplateInputs) -> Result<Vec<Template>, LaunchError> {
        let choice = shape.choice(&self.context.catalog(&inputs.class));
        let (settings, region) = (self.context.options.settings(&inputs.class), self.context.offerings.snapshot());
        let shapes = Shapes::of(&settings, &region.types);
        let inputs = self.context.launch_inputs(&shape.request, &shape.claim, inputs, shapes);
        let groups = inputs.template_groups(&choice, &inputs.tags()?)?;
        Ok(groups.into_iter().map(|group| group.template).collect())
    }
}

#[cfg(test)]
mod tests;
