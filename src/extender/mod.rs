//! The extender room.
