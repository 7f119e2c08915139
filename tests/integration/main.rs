//! Tests that link the library or run the built binary, in one program: it is linked once.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod binary;
mod citations;
mod reference_pages;
mod server;
