//! Seeded draws without state: the same seed and words give the same number, in any order of calls. A simulation is therefore
//! repeatable across restarts and under concurrent calls, unlike with a stream of random numbers.

/// A 64-bit number that depends on `seed` and every one of `words`.
#[must_use]
pub fn draw(seed: u64, words: &[&str]) -> u64 {
    // FNV-1a over the words, with a separator that no word contains, then the splitmix64 finalizer.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ mix(seed);
    for word in words {
        for byte in word.bytes().chain(std::iter::once(0xff)) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    mix(hash)
}

/// A number in `low..=high`; `low` where the range is empty.
#[must_use]
pub fn draw_between(seed: u64, words: &[&str], low: i64, high: i64) -> i64 {
    let Some(width) = high.checked_sub(low).and_then(|width| u64::try_from(width).ok()) else {
        return low;
    };
    let offset = draw(seed, words) % width.saturating_add(1);
    low.saturating_add(i64::try_from(offset).unwrap_or(0))
}

/// The finalizer of splitmix64: a bijection that spreads every bit over all others.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_depends_on_the_seed_and_the_boundaries_of_words() {
        assert_eq!(draw(7, &["a", "b"]), draw(7, &["a", "b"]));
        assert_ne!(draw(7, &["a", "b"]), draw(8, &["a", "b"]));
        assert_ne!(draw(7, &["ab", "c"]), draw(7, &["a", "bc"]));
    }

    #[test]
    fn a_bounded_draw_stays_in_its_range_and_reaches_both_ends() {
        let drawn: std::collections::BTreeSet<i64> =
            (0..200).map(|n| draw_between(1, &[&n.to_string()], -2, 3)).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [-2, -1, 0, 1, 2, 3]);
        assert_eq!(draw_between(1, &["x"], 5, 5), 5);
        assert_eq!(draw_between(1, &["x"], 5, 4), 5);
    }
}
