//! Reserved capacity that is counted: paid for already, so it is filled before anything is bought, as nodes that exist are.
//!
//! Columns of counted reservations are in no other set of columns: a price next to nothing without end would make the dual
//! prices worthless.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::model::labels;
use crate::model::offering::InstanceType;
use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::{dot, float};
use crate::planner::columns::sets::ColumnSets;
use crate::planner::groups::group::usable;
use crate::planner::state::demand::Bin;
use crate::planner::state::plan_state::{PlanState, PurchasedNode};

/// What is left of each reservation. NodePools that may use the same one share it, and so do partitions.
pub(crate) struct Reserved {
    /// Where counts of one reservation differ, the lowest.
    left: Vec<i64>,
    /// Columns, and which reservation of `left` each is of.
    columns: Vec<(usize, usize)>,
}

impl Reserved {
    pub fn new(column_sets: &ColumnSets<'_>) -> Self {
        let mut out = Self { left: Vec::new(), columns: Vec::new() };
        let mut known: BTreeMap<(&str, &str, Option<&str>), usize> = BTreeMap::new();
        for (at, column) in column_sets.columns.iter().enumerate() {
            let Some(count) = column.left else { continue };
            let id = column.labels.get(labels::CAPACITY_RESERVATION_ID).map(String::as_str);
            let reservation =
                *known.entry((&*column_sets.instance_type(at).name, &*column.zone, id)).or_insert_with(|| {
                    out.left.push(count);
                    out.left.len() - 1
                });
            out.left[reservation] = out.left[reservation].min(count);
            out.columns.push((at, reservation));
        }
        out
    }
}

impl PlanState<'_, '_, '_> {
    /// Fills reservations of a tier, those that what is left fills best first.
    pub fn use_reserved(&mut self, reserved: &mut Reserved, tier: &Bits, active: &dyn Fn(usize) -> bool) {
        let columns: Vec<(usize, usize)> =
            reserved.columns.iter().copied().filter(|(column, _)| tier.contains(*column)).collect();
        if columns.is_empty() {
            return;
        }
        let allowed: Vec<Option<Bits>> =
            (0..self.demand.places.len()).map(|place| active(place).then(|| self.reservable(place))).collect();
        while !self.demand.is_empty() {
            let mut best: Option<(f64, usize, PurchasedNode)> = None;
            for (column, reservation) in columns.iter().copied() {
                let instance_type = Arc::clone(self.column_sets.instance_type(column));
                if reserved.left[reservation] <= 0
                    || !self.budgets[self.column_sets.pool(column)].allows(&instance_type.capacity)
                {
                    continue;
                }
                let buckets =
                    self.demand.open_buckets(|place| allowed[place].as_ref().is_some_and(|bits| bits.contains(column)));
                if buckets.is_empty() {
                    continue;
                }
                let host = self.daemon_host(column).clone();
                let bin = Bin { room: self.column_sets.room(column), host: &host, content: &[] };
                let content = self.demand.fill(&bin, &self.reference, &buckets, None, &[], 0);
                if content.is_empty() || !self.min_values_hold(column, &content) {
                    continue;
                }
                let load: f64 =
                    content.iter().map(|(item, n)| dot(self.demand.need(*item), &self.reference) * float(*n)).sum();
                let share = load / dot(self.column_sets.room(column), &self.reference).max(1.0);
                if best.as_ref().is_none_or(|(have, ..)| share > *have) {
                    best = Some((share, reservation, PurchasedNode { column, content }));
                }
            }
            let Some((_, reservation, bought)) = best else { return };
            self.buy_reserved(&mut reserved.left[reservation], bought);
        }
    }

    /// Buys a reserved node, and as many like it as the same pods fill.
    fn buy_reserved(&mut self, left: &mut i64, bought: PurchasedNode) {
        let instance_type: Arc<InstanceType> = Arc::clone(self.column_sets.instance_type(bought.column));
        let pool = self.column_sets.pool(bought.column);
        let most = bought.content.iter().map(|(item, count)| self.demand.items[*item].left / count).min().unwrap_or(0);
        let most = most.min(usize::try_from(*left).unwrap_or(0));
        let copies = self.budgets[pool].copies(&instance_type.capacity, most).max(1);
        *left -= i64::try_from(copies).unwrap_or(i64::MAX);
        self.budgets[pool].spend(&instance_type.capacity, copies);
        self.demand.take(&bought.content, copies);
        self.bought.extend(std::iter::repeat_n(bought, copies));
    }

    /// Columns of reservations and others that a place's requirements allow.
    pub fn reservable(&mut self, place: usize) -> Bits {
        let mut bits = usable(self.column_sets, &self.demand.groups[self.demand.places[place].sample]);
        for (key, domain) in &self.demand.places[place].pins {
            bits.and(&self.topology.keys[*key].columns[*domain]);
        }
        bits
    }
}
