//! The controllers room.
