//! Hashes of Go values as the Go library hashstructure computes them. `None` is an absent value, which is not hashed.

use serde_json::Value;

pub(crate) fn string(value: &Value) -> Option<u64> {
    value.as_str().map(text)
}

/// A string that is absent when empty.
pub(crate) fn non_empty(value: &Value) -> Option<u64> {
    value.as_str().filter(|value| !value.is_empty()).map(text)
}

pub(crate) fn boolean(value: &Value) -> Option<u64> {
    value.as_bool().map(|value| fnv1(&[u8::from(value)]))
}

/// A boolean that is absent when false.
pub(crate) fn non_false(value: &Value) -> Option<u64> {
    boolean(value).filter(|_| value.as_bool() == Some(true))
}

pub(crate) fn int64(value: &Value) -> Option<u64> {
    value.as_i64().map(|value| fnv1(&value.to_le_bytes()))
}

pub(crate) fn int32(value: &Value) -> Option<u64> {
    value.as_i64().and_then(|value| i32::try_from(value).ok()).map(|value| fnv1(&value.to_le_bytes()))
}

/// A map; the hash does not depend on the order. `None` also where a value has no hash.
pub(crate) fn map(value: &Value, of_value: impl Fn(&Value) -> Option<u64>) -> Option<u64> {
    let entry = |(key, value): (&String, &Value)| Some(ordered(text(key), of_value(value)?));
    let hash = value.as_object()?.iter().map(entry).try_fold(0, |hash, entry| Some(hash ^ entry?))?;
    Some(finish(hash))
}

/// A map of strings.
pub(crate) fn strings(value: &Value) -> Option<u64> {
    map(value, string)
}

/// A `metav1.Duration`.
pub(crate) fn duration(nanoseconds: i64) -> u64 {
    let hash = (nanoseconds != 0).then(|| fnv1(&nanoseconds.to_le_bytes()));
    Struct::new("Duration").field("Duration", hash).finish()
}

/// A list as a set: the hash does not depend on the order, and a pair of equal items cancels out. `None` also where an item has no hash.
pub(crate) fn set(value: &Value, of_item: impl Fn(&Value) -> Option<u64>) -> Option<u64> {
    value.as_array()?.iter().try_fold(0, |hash, item| Some(hash ^ of_item(item)?))
}

/// The hash of a Go struct. Fields are added in the order of their declaration; absent fields are not hashed.
pub(crate) struct Struct {
    hash: u64,
    fields: usize,
}

impl Struct {
    pub(crate) fn new(type_name: &str) -> Self {
        Self { hash: text(type_name), fields: 0 }
    }

    pub(crate) fn field(mut self, name: &str, value: Option<u64>) -> Self {
        if let Some(value) = value {
            self.hash = finish(self.hash ^ ordered(text(name), value));
            self.fields += 1;
        }
        self
    }

    pub(crate) fn finish(self) -> u64 {
        self.hash
    }

    /// The hash, or `None` when the struct is its zero value.
    pub(crate) fn non_zero(self) -> Option<u64> {
        (self.fields > 0).then_some(self.hash)
    }
}

pub(crate) fn text(text: &str) -> u64 {
    fnv1(text.as_bytes())
}

pub(crate) fn ordered(first: u64, second: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    fnv1(&bytes)
}

pub(crate) fn finish(hash: u64) -> u64 {
    fnv1(&hash.to_le_bytes())
}

/// 64-bit FNV-1 (not 1a).
pub(crate) fn fnv1(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(*byte))
}
