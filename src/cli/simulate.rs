//! temp
use std::io::Write;
/// temp
#[derive(Debug, clap::Args)]
pub struct SimulateArgs {}
/// temp
pub fn run(_a: &SimulateArgs, _o: &mut dyn Write) -> anyhow::Result<u8> { Ok(0) }
