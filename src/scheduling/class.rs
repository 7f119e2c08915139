//! Pod classes: pods that ask for the same thing.



/// Placeholder until the core lands.
#[derive(Debug)]
pub struct PodClass {
    /// Requests, one pod slot included.
    pub requests: super::resources::Resources,
    /// Priority.
    pub priority: i32,
}
