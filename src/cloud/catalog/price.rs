//! Prices of the raw catalog: on-demand list prices, and spot prices by a rule.

use serde::{Deserialize, Deserializer};
use stowage_model::draw::draw_between;
use stowage_model::units::MicroUsd;

/// Why a spot ratio can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("spot ratio {0} is not a number from 0 to 100")]
pub struct PriceError(String);

/// Spot price divided by on-demand price, as an integer so that prices are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpotRatio {
    // Parts per million would be coarser than the tolerance of the plan checker.
    parts_per_billion: i64,
}

impl SpotRatio {
    const BILLION: i64 = 1_000_000_000;

    /// The ratio nearest to `ratio`.
    ///
    /// # Errors
    /// `ratio` is not a number from 0 to 100.
    pub fn new(ratio: f64) -> Result<Self, PriceError> {
        if !(0.0..=100.0).contains(&ratio) {
            return Err(PriceError(ratio.to_string()));
        }
        // Rounded and in range, so the cast is exact.
        #[allow(clippy::cast_possible_truncation)]
        let parts_per_billion = (ratio * 1e9).round() as i64;
        Ok(Self { parts_per_billion })
    }

    /// `parts` millionths, clamped to 0 to 100.
    #[must_use]
    pub fn from_parts_per_million(parts: i64) -> Self {
        Self { parts_per_billion: parts.clamp(0, 100_000_000) * 1000 }
    }

    /// This share of a price, rounded to the nearest micro-dollar.
    #[must_use]
    pub fn of(self, price: MicroUsd) -> MicroUsd {
        let product = i128::from(price.0) * i128::from(self.parts_per_billion);
        let rounded = (product + i128::from(Self::BILLION / 2)).div_euclid(i128::from(Self::BILLION));
        MicroUsd(i64::try_from(rounded).unwrap_or(i64::MAX))
    }
}

/// Where spot prices come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpotPricing {
    /// No spot offerings.
    Off,
    /// The same share of every on-demand price.
    Ratio(SpotRatio),
    /// Synthetic prices, not those of EC2: 25 to 60 % of the on-demand price, drawn per instance type and zone from the seed.
    Synthetic {
        /// Seed of the draws.
        seed: u64,
    },
}

impl SpotPricing {
    /// The meaning of `--spot-ratio`: 0 offers no spot, any other number is a [`SpotPricing::Ratio`].
    ///
    /// # Errors
    /// `ratio` is not a number from 0 to 100.
    pub fn ratio(ratio: f64) -> Result<Self, PriceError> {
        let parsed = SpotRatio::new(ratio)?;
        Ok(if parsed.parts_per_billion == 0 { Self::Off } else { Self::Ratio(parsed) })
    }

    /// The spot price of an instance type in a zone; `None` where no spot is offered.
    #[must_use]
    pub fn price(self, instance_type: &str, zone: &str, on_demand: MicroUsd) -> Option<MicroUsd> {
        match self {
            Self::Off => None,
            Self::Ratio(ratio) => Some(ratio.of(on_demand)),
            Self::Synthetic { seed } => {
                // Prices of one type are similar in all zones, as in EC2: most of the draw depends on the type only.
                let own = draw_between(seed, &["spot", instance_type], 250_000, 500_000);
                let zonal = draw_between(seed, &["spot", instance_type, zone], 0, 100_000);
                Some(SpotRatio::from_parts_per_million(own + zonal).of(on_demand))
            }
        }
    }
}

/// US dollars, a JSON number or null, to the nearest micro-dollar.
pub(crate) fn deserialize_usd<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<MicroUsd>, D::Error> {
    let Some(usd) = Option::<f64>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let price = MicroUsd::from_usd(usd)
        .ok_or_else(|| serde::de::Error::custom(format!("onDemandUsdPerHour is {usd}, expected 0 to 1000000")))?;
    Ok(Some(price))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_rounded_to_the_nearest_micro_dollar() {
        for (price, ratio, expected) in [
            (96_000, 0.4, 38_400),
            (25_500, 1.0, 25_500),
            (4_200, 0.333_333_333, 1_400),
            (55_040_000, 1.0 / 3.0, 18_346_667),
            (1, 0.5, 1),
            (1, 0.49, 0),
        ] {
            let priced = SpotPricing::ratio(ratio).unwrap().price("m5.large", "a", MicroUsd(price));
            assert_eq!(priced, Some(MicroUsd(expected)), "{price} x {ratio}");
        }
    }

    #[test]
    fn ratio_zero_has_no_spot_offerings_and_invalid_ratios_are_rejected() {
        assert_eq!(SpotPricing::ratio(0.0), Ok(SpotPricing::Off));
        for bad in [-0.1, 100.5, f64::NAN, f64::INFINITY] {
            let text = SpotPricing::ratio(bad).unwrap_err().to_string();
            assert_eq!(text, format!("spot ratio {bad} is not a number from 0 to 100"));
        }
    }

    #[test]
    fn synthetic_prices_differ_by_zone_and_seed_and_stay_between_25_and_60_percent() {
        let price = |seed, name: &str, zone: &str| {
            SpotPricing::Synthetic { seed }.price(name, zone, MicroUsd(1_000_000)).unwrap().0
        };
        let all: Vec<i64> = (0..500).map(|n| price(3, &format!("m{n}.large"), "us-east-1a")).collect();
        assert!(all.iter().all(|price| (250_000..=600_000).contains(price)));
        assert!(all.iter().min() < Some(&300_000) && all.iter().max() > Some(&550_000));
        assert_eq!(price(3, "m5.large", "a"), price(3, "m5.large", "a"));
        assert_ne!(price(3, "m5.large", "a"), price(3, "m5.large", "b"));
        assert_ne!(price(3, "m5.large", "a"), price(4, "m5.large", "a"));
        assert!((price(3, "m5.large", "a") - price(3, "m5.large", "b")).abs() <= 100_000);
    }
}
