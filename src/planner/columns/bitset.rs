//! A fixed-size set of column indexes.

use std::ops::Range;
use std::sync::Arc;

/// A set of small integers, as a bit vector. Clones share it until one is changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Bits {
    words: Arc<Vec<u64>>,
}

impl Bits {
    /// The empty set with room for `len` members.
    pub fn empty(len: usize) -> Self {
        Self { words: Arc::new(vec![0; len.div_ceil(64)]) }
    }

    /// All of `0..len`.
    pub fn full(len: usize) -> Self {
        let mut words = vec![u64::MAX; len.div_ceil(64)];
        if !len.is_multiple_of(64)
            && let Some(last) = words.last_mut()
        {
            *last = (1 << (len % 64)) - 1;
        }
        Self { words: Arc::new(words) }
    }

    /// The address of the shared words: equal for clones.
    pub fn address(&self) -> usize {
        Arc::as_ptr(&self.words).addr()
    }

    pub fn insert(&mut self, at: usize) {
        Arc::make_mut(&mut self.words)[at / 64] |= 1 << (at % 64);
    }

    pub fn contains(&self, at: usize) -> bool {
        self.words[at / 64] >> (at % 64) & 1 == 1
    }

    pub fn and(&mut self, other: &Self) {
        if self.words.iter().zip(other.words.iter()).all(|(word, with)| word & !with == 0) {
            return;
        }
        for (word, with) in Arc::make_mut(&mut self.words).iter_mut().zip(other.words.iter()) {
            *word &= with;
        }
    }

    /// The members of both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        let mut out = self.clone();
        out.and(other);
        out
    }

    pub fn or(&mut self, other: &Self) {
        if Arc::ptr_eq(&self.words, &other.words) {
            return;
        }
        for (word, with) in Arc::make_mut(&mut self.words).iter_mut().zip(other.words.iter()) {
            *word |= with;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> {
        members(&self.words, 0)
    }

    /// The members in a range.
    pub fn within(&self, range: Range<usize>) -> impl Iterator<Item = usize> {
        let (first, end) = (range.start / 64, range.end.div_ceil(64).max(range.start / 64));
        members(&self.words[first..end], first).filter(move |at| range.contains(at))
    }
}

/// The members in some of the words, of which the first has the number `first`.
fn members(words: &[u64], first: usize) -> impl Iterator<Item = usize> {
    words.iter().enumerate().flat_map(move |(at, word)| {
        let mut rest = *word;
        std::iter::from_fn(move || {
            (rest != 0).then(|| {
                let bit = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                (first + at) * 64 + bit
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_match_those_of_a_set_of_integers() {
        for len in [0, 1, 63, 64, 65, 200] {
            assert_eq!(Bits::full(len).iter().collect::<Vec<_>>(), (0..len).collect::<Vec<_>>());
            assert!(Bits::empty(len).is_empty());
        }
        let mut a = Bits::empty(130);
        let mut b = Bits::empty(130);
        a.insert(3);
        a.insert(129);
        b.insert(129);
        let mut both = a.clone();
        both.and(&b);
        assert_eq!(both.iter().collect::<Vec<_>>(), [129]);
        b.or(&a);
        assert!(b.contains(3) && !b.contains(4) && b.len() == 2);
        for range in [0..130, 3..4, 4..129, 4..130, 64..130, 129..130, 130..130, 5..5] {
            let members: Vec<usize> = b.iter().filter(|at| range.contains(at)).collect();
            assert_eq!(b.within(range.clone()).collect::<Vec<_>>(), members, "{range:?}");
        }
    }
}
