//! Launch templates made ahead of launches: those that the launches of the last hour would ask for now, of the node class and the
//! cluster as they are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::launch::request::{Shapes, TemplateInputs, launchable};
use crate::cloud::ec2::launch::templates::recent::{Kept, LaunchShape};
use crate::cloud::ec2::launch::templates::spec::Template;
use crate::cloud::{Cloud, LaunchError};

/// Most templates that a sweep makes: launches share their rate limit.
const MOST_MADE: usize = 20;

impl Ec2Provider {
    /// Looks after the launch templates: deletes those that are not wanted any more, and makes those that will be.
    pub(crate) async fn sweep_templates(&self, now_ms: i64) {
        // What is wanted is noted before anything is deleted, and before a call that may take long.
        let missing = self.missing_templates(now_ms);
        self.make_ahead(missing, now_ms).await;
        self.templates.delete_unused(&self.clients, now_ms).await;
    }

    /// Makes templates, one after the other; the first failure ends it until the next sweep.
    async fn make_ahead(&self, mut missing: Vec<Template>, now_ms: i64) {
        let failures = self.failures_ahead.load(Ordering::Relaxed);
        // Each failure has the next sweep begin with another one, so that what can't be made holds up nothing else.
        let first = failures % missing.len().max(1);
        missing.rotate_left(first);
        for template in missing.iter().take(MOST_MADE) {
            if let Err(error) = self.templates.ensure(&self.clients, template, now_ms).await {
                if failures == 0 {
                    let (class, name) = (&template.class, template.name());
                    tracing::warn!(class, name, %error, "launch template could not be made ahead, trying again with every sweep");
                }
                self.failures_ahead.store(failures + 1, Ordering::Relaxed);
                return;
            }
        }
        if missing.len() <= MOST_MADE {
            self.failures_ahead.store(0, Ordering::Relaxed);
        }
    }

    /// The templates that are wanted and not known to be in EC2; notes of all others that they are wanted.
    fn missing_templates(&self, now_ms: i64) -> Vec<Template> {
        let mut missing = BTreeMap::new();
        for mut kept in self.shapes.take(now_ms) {
            match self.missing_of(&mut kept, now_ms) {
                Ok(found) => missing.extend(found.into_iter().map(|template| (template.name(), template))),
                Err(error) => {
                    tracing::debug!(class = kept.shape.request.node_class, %error, "nothing could be launched like this any more");
                    continue;
                }
            }
            self.shapes.keep(kept);
        }
        missing.into_values().collect()
    }

    /// The missing templates of a shape, which are made anew where something that they are made of is another one.
    fn missing_of(&self, kept: &mut Kept, now_ms: i64) -> Result<Vec<Template>, LaunchError> {
        let is_missing = |name: &String| !self.templates.touch(name, now_ms);
        let group = self.known_group(&kept.class);
        let lacks_group = kept.class.spec.placement_group_selector.is_some() && group.is_none();
        if lacks_group || launchable(&kept.class).is_err() {
            // What is there stays, for it may be as it should be.
            for name in &kept.names {
                self.templates.touch(name, now_ms);
            }
            return Ok(vec![]);
        }
        let basis = self.basis(Arc::clone(&kept.class), group);
        if basis.is(&kept.basis) && kept.names.iter().filter(|name| is_missing(name)).count() == 0 {
            return Ok(vec![]);
        }
        let templates = self.templates_of(&kept.shape, &basis)?;
        (kept.names, kept.basis) = (templates.iter().map(Template::name).collect(), basis);
        Ok(templates.into_iter().filter(|template| is_missing(&template.name())).collect())
    }

    /// The templates of a launch of this shape.
    fn templates_of(&self, shape: &LaunchShape, basis: &TemplateInputs) -> Result<Vec<Template>, LaunchError> {
        let choice = shape.choice(&self.catalog(&basis.class));
        let (settings, region) = (self.options.settings(&basis.class), self.snapshot());
        let ground = self.ground(&shape.request, &shape.claim, basis, Shapes::of(&settings, &region.types));
        let groups = ground.groups(&choice, &ground.tags()?)?;
        Ok(groups.into_iter().map(|group| group.template).collect())
    }
}

#[cfg(test)]
mod tests;
