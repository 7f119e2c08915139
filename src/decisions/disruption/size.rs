//! CPU and memory together: what estimates count with.

use stowage_model::resources::Resources;

/// Millicores and bytes of memory.
pub type Size = [i64; 2];

/// CPU and memory of resources.
pub fn size(resources: &Resources) -> Size {
    [resources.cpu.0, resources.memory.0]
}

/// The sum, saturating: the requests of a pod may be any number.
pub fn sum(a: Size, b: Size) -> Size {
    [a[0].saturating_add(b[0]), a[1].saturating_add(b[1])]
}

/// What is left, saturating; may become negative.
pub fn less(from: Size, what: Size) -> Size {
    [from[0].saturating_sub(what[0]), from[1].saturating_sub(what[1])]
}
