//! Fuzzing of everything that parses outside input: mutants of the seeds in `tests/seeds`, from a fixed sequence of random numbers.
//!
//! `cargo test` runs a few thousand executions of each target; `make fuzz` runs ten million in total. A target fails by a panic; the
//! failing input is printed, so that it can become a seed.

mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;

use fastrand::Rng;
use mutate::Mutator;

/// Executions of a target when `STOWAGE_FUZZ_EXECUTIONS` does not set them.
const EXECUTIONS: u64 = 2_000;

/// Runs the target on each of its seeds and then on mutants of them. `cost` divides the number of executions.
///
/// # Panics
/// If the target panics, or accepts no seed: `target` returns whether the input parses, and a seed that does not parse tests nothing.
fn fuzz(name: &str, cost: u64, target: impl Fn(&[u8]) -> bool) {
    let seeds = seeds(name);
    assert!(seeds.iter().any(|seed| target(seed)), "no seed of {name} parses");
    let setting = |variable: &str| std::env::var(variable).ok().and_then(|text| text.parse::<u64>().ok());
    let executions = setting("STOWAGE_FUZZ_EXECUTIONS").unwrap_or(EXECUTIONS) / cost;
    let seed = setting("STOWAGE_FUZZ_SEED").unwrap_or(11);
    let mut mutator = Mutator::new(Rng::with_seed(seed), seeds);
    let mut parsed = 0_u64;
    for _ in 0..executions {
        let input = mutator.next();
        match catch_unwind(AssertUnwindSafe(|| target(&input))) {
            Ok(accepted) => parsed += u64::from(accepted),
            Err(panic) => {
                eprintln!("{name} panics; a seed for tests/seeds/{name}: {}", String::from_utf8_lossy(&input));
                resume_unwind(panic);
            }
        }
    }
    println!("{name}: {executions} executions, {parsed} parsed");
    // Mutants that nothing accepts would test the parser of JSON only.
    assert!(executions < 100 || parsed > executions / 100, "only {parsed} of {executions} mutants parse");
}

/// The files of `tests/seeds/NAME`, sorted by name.
fn seeds(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/seeds").join(name);
    let mut paths: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}
