//! The cluster room.
