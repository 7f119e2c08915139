//! The master problem of column generation: cover every kind of pod by patterns at least cost, in fractions of nodes.
//!
//! A primal simplex method with an explicit inverse of the basis. It keeps its basis when patterns are added, and yields the values of pods
//! (dual) and the nodes of each pattern (primal) at once. One node for a single pod of each kind is the first basis, so that every problem has
//! a solution.

use crate::columns::dims::float;
use crate::state::demand::pattern::Pattern;

/// Reduced cost, as a share of the price, below which a column enters the basis.
const TOLERANCE: f64 = 1e-7;
/// Smallest element that is a pivot.
const MIN_PIVOT: f64 = 1e-7;
/// Pivots after which the inverse is computed from the basis again.
const REINVERT: usize = 120;
/// Pivots per row in one optimization, at most.
const MAX_PIVOTS_PER_ROW: usize = 30;
/// Distinct small additions to the right-hand side end ties in the ratio test, which could make the method cycle.
const PERTURBATION: f64 = 1e-6;

/// A pattern that a node of a kind can hold, and the price of that node in micro-USD per hour.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PricedPattern {
    pub node: usize,
    pub price: f64,
    /// Kinds of pods and counts, ascending.
    pub pods: Pattern,
}

/// A column of the master problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    /// The cheapest node for one pod of a kind, by row; it holds nothing else.
    Single(usize),
    /// A pod of a kind more than there are, by row.
    Surplus(usize),
    Pattern(usize),
}

/// The master problem for given counts of pods.
pub(crate) struct Master {
    /// The kind of pod of each row, and the row of each kind: kinds without pods have none.
    kinds: Vec<usize>,
    row_of: Vec<usize>,
    /// Price of the cheapest node for one pod, by row.
    single: Vec<f64>,
    required: Vec<f64>,
    basis: Vec<Column>,
    /// Row by row.
    inverse: Vec<f64>,
    /// Amount of each basic column.
    amounts: Vec<f64>,
    values: Vec<f64>,
    pivots: usize,
}

impl Master {
    /// `single` is the price of the cheapest node for one pod of each kind.
    pub fn new(counts: &[usize], single: &[f64]) -> Self {
        let kinds: Vec<usize> = (0..counts.len()).filter(|kind| counts[*kind] > 0).collect();
        let mut row_of = vec![usize::MAX; counts.len()];
        kinds.iter().enumerate().for_each(|(row, kind)| row_of[*kind] = row);
        let rows = kinds.len();
        let perturbed =
            |(row, kind): (usize, &usize)| float(counts[*kind]) + PERTURBATION * float(row + 1) / float(rows);
        let required: Vec<f64> = kinds.iter().enumerate().map(perturbed).collect();
        let single: Vec<f64> = kinds.iter().map(|kind| single[*kind]).collect();
        let mut inverse = vec![0.0; rows * rows];
        (0..rows).for_each(|row| inverse[row * rows + row] = 1.0);
        Self {
            kinds,
            row_of,
            amounts: required.clone(),
            required,
            basis: (0..rows).map(Column::Single).collect(),
            inverse,
            values: single.clone(),
            single,
            pivots: 0,
        }
    }

    /// Value of a pod of each kind, in micro-USD per hour; zero of kinds without pods.
    pub fn values(&self) -> Vec<f64> {
        self.row_of.iter().map(|row| self.values.get(*row).map_or(0.0, |value| value.max(0.0))).collect()
    }

    /// Cost of the optimum, in micro-USD per hour.
    pub fn cost(&self) -> f64 {
        self.values.iter().zip(&self.required).map(|(value, required)| value * required).sum()
    }

    /// Nodes of each pattern of the optimum, by position, in fractions of nodes; a single pod is a pattern of its own, by kind.
    pub fn nodes(&self) -> (Vec<(usize, f64)>, Vec<(usize, f64)>) {
        let mut patterns = Vec::new();
        let mut singles = Vec::new();
        for (column, amount) in self.basis.iter().zip(&self.amounts) {
            match column {
                Column::Pattern(at) => patterns.push((*at, amount.max(0.0))),
                Column::Single(row) => singles.push((self.kinds[*row], amount.max(0.0))),
                Column::Surplus(_) => (),
            }
        }
        (patterns, singles)
    }

    /// Solves the problem for these patterns, which begin with those of the last call. Returns the work: elements of the inverse updated.
    pub fn optimize(&mut self, patterns: &[PricedPattern]) -> usize {
        let rows = self.basis.len();
        let mut pivots = 0;
        while pivots < rows * MAX_PIVOTS_PER_ROW {
            let Some((entering, reduced_cost)) = self.entering(patterns) else { break };
            let direction = self.direction(&self.entries(entering, patterns));
            let Some(leaving) = self.leaving(&direction) else { break };
            self.pivot(entering, reduced_cost, leaving, &direction);
            pivots += 1;
            self.pivots += 1;
            if self.pivots.is_multiple_of(REINVERT) && !self.reinvert(patterns) {
                break;
            }
        }
        pivots * rows * rows
    }

    fn price(&self, column: Column, patterns: &[PricedPattern]) -> f64 {
        match column {
            Column::Single(row) => self.single[row],
            Column::Surplus(_) => 0.0,
            Column::Pattern(at) => patterns[at].price,
        }
    }

    /// The column of most negative reduced cost, as a share of its price.
    fn entering(&self, patterns: &[PricedPattern]) -> Option<(Column, f64)> {
        let mut best: Option<(f64, f64, Column)> = None;
        let mut consider = |share: f64, reduced_cost: f64, column: Column| {
            if share < -TOLERANCE && best.is_none_or(|(have, ..)| share < have) {
                best = Some((share, reduced_cost, column));
            }
        };
        for (at, pattern) in patterns.iter().enumerate() {
            let worth: f64 =
                pattern.pods.iter().map(|(pod, count)| self.values[self.row_of[*pod]] * float(*count)).sum();
            consider((pattern.price - worth) / pattern.price.max(1.0), pattern.price - worth, Column::Pattern(at));
        }
        for (row, value) in self.values.iter().enumerate() {
            let single = self.single[row].max(1.0);
            consider((self.single[row] - value) / single, self.single[row] - value, Column::Single(row));
            consider(value / single, *value, Column::Surplus(row));
        }
        best.map(|(_, reduced_cost, column)| (column, reduced_cost))
    }

    /// The column in terms of the basis.
    fn direction(&self, entries: &[(usize, f64)]) -> Vec<f64> {
        let rows = self.basis.len();
        let of_row = |row: &[f64]| entries.iter().map(|(at, entry)| row[*at] * entry).sum();
        self.inverse.chunks_exact(rows).map(of_row).collect()
    }

    /// The basic column that is the first to reach zero; of equals the largest pivot.
    fn leaving(&self, direction: &[f64]) -> Option<usize> {
        let mut best: Option<(f64, usize)> = None;
        for (row, step) in direction.iter().enumerate().filter(|(_, step)| **step > MIN_PIVOT) {
            let ratio = self.amounts[row].max(0.0) / step;
            let better = |(have, at): (f64, usize)| ratio < have || (ratio <= have && *step > direction[at]);
            if best.is_none_or(better) {
                best = Some((ratio, row));
            }
        }
        best.map(|(_, row)| row)
    }

    fn pivot(&mut self, entering: Column, reduced_cost: f64, leaving: usize, direction: &[f64]) {
        let rows = self.basis.len();
        let pivot = direction[leaving];
        let (amount, start) = (self.amounts[leaving] / pivot, leaving * rows);
        self.inverse[start..start + rows].iter_mut().for_each(|element| *element /= pivot);
        let pivot_row = self.inverse[start..start + rows].to_vec();
        for (row, factor) in direction.iter().enumerate().filter(|(row, factor)| *row != leaving && **factor != 0.0) {
            let elements = &mut self.inverse[row * rows..(row + 1) * rows];
            elements.iter_mut().zip(&pivot_row).for_each(|(element, of_pivot)| *element -= factor * of_pivot);
            self.amounts[row] -= factor * amount;
        }
        self.amounts[leaving] = amount;
        self.basis[leaving] = entering;
        self.values.iter_mut().zip(&pivot_row).for_each(|(value, of_pivot)| *value += reduced_cost * of_pivot);
    }

    /// Computes the inverse, the amounts and the values from the basis again. False if the basis is singular by rounding.
    fn reinvert(&mut self, patterns: &[PricedPattern]) -> bool {
        let rows = self.basis.len();
        let width = 2 * rows;
        // The basis beside the identity matrix, by Gauss-Jordan elimination with partial pivoting.
        let mut tableau = vec![0.0; rows * width];
        for (at, column) in self.basis.iter().enumerate() {
            self.entries(*column, patterns).into_iter().for_each(|(row, entry)| tableau[row * width + at] = entry);
            tableau[at * width + rows + at] = 1.0;
        }
        for at in 0..rows {
            let element = |row: &usize| tableau[row * width + at].abs();
            let Some(largest) = (at..rows).max_by(|a, b| element(a).total_cmp(&element(b))) else { return false };
            if element(&largest) < MIN_PIVOT {
                return false;
            }
            if largest != at {
                (0..width).for_each(|column| tableau.swap(largest * width + column, at * width + column));
            }
            let pivot = tableau[at * width + at];
            tableau[at * width..(at + 1) * width].iter_mut().for_each(|element| *element /= pivot);
            let pivot_row = tableau[at * width..(at + 1) * width].to_vec();
            for row in (0..rows).filter(|row| *row != at) {
                let factor = tableau[row * width + at];
                if factor != 0.0 {
                    let elements = &mut tableau[row * width + at..(row + 1) * width];
                    elements.iter_mut().zip(&pivot_row[at..]).for_each(|(element, of)| *element -= factor * of);
                }
            }
        }
        for row in 0..rows {
            self.inverse[row * rows..(row + 1) * rows].copy_from_slice(&tableau[row * width + rows..(row + 1) * width]);
        }
        let costs: Vec<f64> = self.basis.iter().map(|column| self.price(*column, patterns)).collect();
        self.values = vec![0.0; rows];
        for (row, cost) in self.inverse.chunks_exact(rows).zip(costs) {
            self.values.iter_mut().zip(row).for_each(|(value, element)| *value += cost * element);
        }
        let amount = |row: &[f64]| row.iter().zip(&self.required).map(|(element, required)| element * required).sum();
        self.amounts = self.inverse.chunks_exact(rows).map(amount).collect();
        true
    }

    /// Rows and elements of a column.
    fn entries(&self, column: Column, patterns: &[PricedPattern]) -> Vec<(usize, f64)> {
        match column {
            Column::Single(row) => vec![(row, 1.0)],
            Column::Surplus(row) => vec![(row, -1.0)],
            Column::Pattern(at) => {
                patterns[at].pods.iter().map(|(pod, count)| (self.row_of[*pod], float(*count))).collect()
            }
        }
    }
}
