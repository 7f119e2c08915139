//! Simulated EC2.
