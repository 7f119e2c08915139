//! The disruption room.
