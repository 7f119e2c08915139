//! What can happen to a simulated instance.

/// An event of an instance. Its names are also the values of the annotation `simulated.stowage.dev/event`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceEvent {
    /// Spot interruption warning, and termination after the notice period.
    SpotInterruption,
    /// A rebalance recommendation.
    Rebalance,
    /// A scheduled maintenance event.
    ScheduledChange,
    /// Termination without a warning.
    Terminate,
    /// The instance keeps running, but its kubelet stops.
    KernelPanic,
}

impl InstanceEvent {
    const ALL: [(&'static str, Self); 5] = [
        ("spot-interruption", Self::SpotInterruption),
        ("rebalance", Self::Rebalance),
        ("scheduled-change", Self::ScheduledChange),
        ("terminate", Self::Terminate),
        ("kernel-panic", Self::KernelPanic),
    ];

    /// Parses a name.
    ///
    /// # Errors
    /// A message with the valid names.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::ALL.iter().find(|(name, _)| *name == text).map(|(_, event)| *event).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|(name, _)| *name).collect();
            format!("`{text}` is no event; expected one of {}", names.join(", "))
        })
    }
}
