//! Mutations of seeds: of JSON trees mostly, of bytes sometimes.

use fastrand::Rng;
use serde_json::{Map, Value};

/// Values that break careless code: limits of integers, quantities, labels, times, and texts of other types.
const HOSTILE: &[&str] = &[
    "null",
    "true",
    "false",
    "0",
    "-1",
    "1",
    "2147483647",
    "-2147483648",
    "2147483648",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "1e400",
    "-0.0",
    "1e-7",
    "[]",
    "{}",
    "[[]]",
    "[null]",
    "{\"\":null}",
    "\"\"",
    "\" \"",
    "\"0\"",
    "\"-1\"",
    "\"9223372036854775807\"",
    "\"9223372036854775808\"",
    "\"4611686018416650649\"",
    "\"1e30\"",
    "\"1E\"",
    "\"1Ei\"",
    "\"8Ei\"",
    "\"0.0000000001\"",
    "\"100m\"",
    "\"1n\"",
    "\".\"",
    "\"5.\"",
    "\"+1\"",
    "\"Infinity\"",
    "\"NaN\"",
    "\"\\u0000\"",
    "\"\\ud83e\\udd80\"",
    "\"!not a label value\"",
    "\"a/b/c\"",
    "\"/\"",
    "\"kubernetes.io/hostname\"",
    "\"topology.kubernetes.io/zone\"",
    "\"karpenter.sh/capacity-type\"",
    "\"node.kubernetes.io/instance-type\"",
    "\"Exists\"",
    "\"DoesNotExist\"",
    "\"NotIn\"",
    "\"Gt\"",
    "\"Lt\"",
    "\"In\"",
    "\"Never\"",
    "\"0s\"",
    "\"-1h\"",
    "\"292277h\"",
    "\"1970-01-01T00:00:00Z\"",
    "\"9999-12-31T23:59:59Z\"",
    "\"2026-02-30T25:61:61Z\"",
    "\"100%\"",
    "\"101%\"",
    "\"-5%\"",
    "\"* * * * *\"",
    "\"@every 1s\"",
    "\"DoNotSchedule\"",
    "\"ScheduleAnyway\"",
    "\"Pending\"",
    "\"i-0123456789abcdef0\"",
];

/// Maximum size of a mutant in bytes: repeated growth must not make the run slow.
const LARGEST: usize = 64 << 10;

/// An endless sequence of mutants.
pub(crate) struct Mutator {
    rng: Rng,
    seeds: Vec<Vec<u8>>,
    trees: Vec<Value>,
    hostile: Vec<Value>,
}

impl Mutator {
    pub(crate) fn new(rng: Rng, seeds: Vec<Vec<u8>>) -> Self {
        let trees = seeds.iter().filter_map(|seed| serde_json::from_slice(seed).ok()).collect();
        let hostile = HOSTILE.iter().filter_map(|text| serde_json::from_str(text).ok()).collect();
        Self { rng, seeds, trees, hostile }
    }

    pub(crate) fn next(&mut self) -> Vec<u8> {
        let of_bytes = self.trees.is_empty() || self.rng.u8(..10) == 0;
        let mut out = if of_bytes { self.rng.choice(&self.seeds).unwrap().clone() } else { self.tree() };
        if of_bytes {
            for _ in 0..self.rng.usize(1..8) {
                self.mutate_bytes(&mut out);
            }
        }
        out.truncate(LARGEST);
        out
    }

    fn tree(&mut self) -> Vec<u8> {
        let mut tree = self.rng.choice(&self.trees).unwrap().clone();
        for _ in 0..self.rng.usize(1..6) {
            let nodes = count(&tree);
            let at = self.rng.usize(..nodes);
            if let Some(node) = nth(&mut tree, at) {
                self.mutate(node);
            }
        }
        serde_json::to_vec(&tree).unwrap()
    }

    /// Replaces, removes, repeats or nests one value.
    fn mutate(&mut self, node: &mut Value) {
        match self.rng.u8(..8) {
            0..=2 => *node = self.rng.choice(&self.hostile).unwrap().clone(),
            3 => {
                // A subtree of any seed.
                let donor = self.rng.usize(..self.trees.len());
                let at = self.rng.usize(..count(&self.trees[donor]));
                let mut tree = self.trees[donor].clone();
                if let Some(found) = nth(&mut tree, at) {
                    *node = found.take();
                }
            }
            4 => match node {
                Value::Array(items) if !items.is_empty() => {
                    items.swap_remove(self.rng.usize(..items.len()));
                }
                Value::Object(members) if !members.is_empty() => {
                    let key = members.keys().nth(self.rng.usize(..members.len())).cloned();
                    members.remove(&key.unwrap());
                }
                _ => *node = Value::Null,
            },
            5 => match node {
                Value::Array(items) if !items.is_empty() => {
                    let item = self.rng.choice(items.as_slice()).cloned().unwrap();
                    items.extend(std::iter::repeat_n(item, self.rng.usize(1..20)));
                }
                Value::Object(members) => {
                    let value = self.rng.choice(&self.hostile).unwrap().clone();
                    members.insert(format!("key-{}", self.rng.u8(..)), value);
                }
                Value::String(text) => *text = text.repeat(self.rng.usize(2..30)),
                _ => {}
            },
            6 => match node {
                Value::Number(number) => {
                    let sum = number.as_i64().unwrap_or(0).wrapping_add(self.rng.i64(-2..3));
                    *node = if self.rng.bool() { sum.into() } else { self.rng.i64(..).into() };
                }
                Value::String(text) => {
                    let mut bytes = std::mem::take(text).into_bytes();
                    self.mutate_bytes(&mut bytes);
                    *text = String::from_utf8_lossy(&bytes).into_owned();
                }
                _ => {}
            },
            _ => {
                let inner = node.take();
                *node = if self.rng.bool() {
                    Value::Array(vec![inner])
                } else {
                    Value::Object(Map::from_iter([("nested".to_owned(), inner)]))
                };
            }
        }
    }

    fn mutate_bytes(&mut self, bytes: &mut Vec<u8>) {
        let at = self.rng.usize(..=bytes.len());
        match self.rng.u8(..6) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, self.rng.u8(..)),
            2 if at < bytes.len() => {
                bytes.remove(at);
            }
            3 if at < bytes.len() => bytes[at] ^= 1 << self.rng.u8(..8),
            4 => {
                let end = self.rng.usize(at..=bytes.len());
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            _ => {
                let text = *self.rng.choice(HOSTILE).unwrap();
                bytes.splice(at..at, text.trim_matches('"').bytes());
            }
        }
        bytes.truncate(LARGEST);
    }
}

/// Number of values in the tree.
fn count(tree: &Value) -> usize {
    1 + match tree {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(members) => members.values().map(count).sum(),
        _ => 0,
    }
}

/// The value at this position in depth-first order.
fn nth(tree: &mut Value, mut at: usize) -> Option<&mut Value> {
    if at == 0 {
        return Some(tree);
    }
    at -= 1;
    let children: Box<dyn Iterator<Item = &mut Value>> = match tree {
        Value::Array(items) => Box::new(items.iter_mut()),
        Value::Object(members) => Box::new(members.values_mut()),
        _ => return None,
    };
    for child in children {
        let size = count(child);
        if at < size {
            return nth(child, at);
        }
        at -= size;
    }
    None
}
