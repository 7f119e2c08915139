//! The admission room.
