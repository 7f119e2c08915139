//! The `stowage` binary: parse arguments, run one subcommand, turn its error into an exit code.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = stowage::cli::Cli::parse();
    let mut out = std::io::stdout().lock();
    let result = stowage::cli::run(&cli, &mut out);
    // A closed stdout pipe is not an error.
    let _ = out.flush();
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
