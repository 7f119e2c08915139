//! Amounts with their unit: CPU, memory, money. The numbers inside are public: where a formula mixes units, it says so.

use std::fmt;

/// CPU in thousandths of a core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millicores(pub i64);

/// An amount of memory or storage in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub i64);

/// A price in millionths of a US dollar per hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MicroUsd(pub i64);

impl Millicores {
    /// Whole cores.
    pub const fn from_cores(cores: i64) -> Self {
        Self(cores * 1000)
    }
}

impl fmt::Display for Millicores {
    /// The CPU quantity in the format of Kubernetes: `2`, `1500m`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 % 1000 == 0 { write!(f, "{}", self.0 / 1000) } else { write!(f, "{}m", self.0) }
    }
}

impl Bytes {
    /// Mebibytes.
    pub const fn from_mib(mib: i64) -> Self {
        Self(mib * (1 << 20))
    }

    /// Gibibytes.
    pub const fn from_gib(gib: i64) -> Self {
        Self(gib * (1 << 30))
    }

    /// Human-readable form: the largest binary suffix, at most one decimal, rounded down: `1.5Gi`. May lose precision.
    pub fn human(self) -> impl fmt::Display {
        HumanBytes(self.0)
    }
}

impl fmt::Display for Bytes {
    /// The memory quantity in the format of Kubernetes: the largest binary suffix that loses no precision.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")]
            .into_iter()
            .find(|(power, _)| self.0 % (1_i64 << power) == 0);
        match exact.filter(|_| self.0 != 0) {
            Some((power, suffix)) => write!(f, "{}{suffix}", self.0 >> power),
            None => write!(f, "{}", self.0),
        }
    }
}

struct HumanBytes(i64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shift, unit) = match self.0 {
            b if b >= 1 << 40 => (40, "Ti"),
            b if b >= 1 << 30 => (30, "Gi"),
            b if b >= 1 << 20 => (20, "Mi"),
            b if b >= 1 << 10 => (10, "Ki"),
            b => return write!(f, "{b}"),
        };
        let tenths = (i128::from(self.0) * 10) >> shift;
        if tenths % 10 == 0 {
            write!(f, "{}{unit}", tenths / 10)
        } else {
            write!(f, "{}.{}{unit}", tenths / 10, tenths % 10)
        }
    }
}

impl MicroUsd {
    /// A price in dollars to the nearest micro-dollar; `None` for a negative number, more than a million, and NaN.
    pub fn from_usd(usd: f64) -> Option<Self> {
        if !(0.0..=1e6).contains(&usd) {
            return None;
        }
        // Rounded and in range, so the cast is exact.
        #[allow(clippy::cast_possible_truncation)]
        let micro = (usd * 1e6).round() as i64;
        Some(Self(micro))
    }

    /// US dollars per hour, for people and JSON.
    #[must_use]
    pub fn usd(self) -> f64 {
        #[allow(clippy::cast_precision_loss)]
        let micro = self.0 as f64;
        micro / 1e6
    }
}

impl fmt::Display for MicroUsd {
    /// In US dollars: `2.5`, `0.0104`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.usd().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_formatted_as_in_kubernetes() {
        for (millicores, text) in [(0, "0"), (1, "1m"), (999, "999m"), (1000, "1"), (1500, "1500m"), (64_000, "64")] {
            assert_eq!(Millicores(millicores).to_string(), text);
        }
        for (bytes, text) in [(0, "0"), (1023, "1023"), (1024, "1Ki"), ((3 << 30) + 1, "3221225473"), (7 << 40, "7Ti")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(
            (Bytes::from_mib(1536).to_string(), Bytes::from_gib(5).to_string()),
            ("1536Mi".into(), "5Gi".into())
        );
        assert_eq!(Millicores::from_cores(2), Millicores(2000));
    }

    #[test]
    fn amounts_for_people_have_at_most_one_decimal() {
        for (bytes, text) in [(3 << 29, "1.5Gi"), (2 << 40, "2Ti"), ((3 << 30) + 1, "3Gi"), (1000, "1000")] {
            assert_eq!(Bytes(bytes).human().to_string(), text);
        }
    }
}
