//! Reserved capacity that is counted: paid for already, so it is filled before anything is bought, as nodes that exist are.
//!
//! Columns of counted reservations are in no other set of columns: a price next to nothing without end would make the dual
//! prices worthless.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::model::labels;
use crate::model::offering::InstanceType;
use crate::planner::columns::bitset::Bits;
use crate::planner::columns::sets::Universe;
use crate::planner::groups::group::Group;
use crate::planner::pack::demand::{Bin, float, worth};
use crate::planner::pack::strategy::{Bought, Packer};

/// What is left of each reservation. NodePools that may use the same one share it, and so do partitions.
pub(crate) struct Reserved {
    /// Where counts of one reservation differ, the lowest.
    left: Vec<i64>,
    /// Columns, and which reservation of `left` each is of.
    columns: Vec<(usize, usize)>,
}

impl Reserved {
    pub fn new(universe: &Universe<'_>) -> Self {
        let mut out = Self { left: Vec::new(), columns: Vec::new() };
        let mut known: BTreeMap<(&str, &str, Option<&str>), usize> = BTreeMap::new();
        for (at, column) in universe.columns.iter().enumerate() {
            let Some(count) = column.left else { continue };
            let id = column.labels.get(labels::CAPACITY_RESERVATION_ID).map(String::as_str);
            let reservation =
                *known.entry((&*universe.instance_type(at).name, &*column.zone, id)).or_insert_with(|| {
                    out.left.push(count);
                    out.left.len() - 1
                });
            out.left[reservation] = out.left[reservation].min(count);
            out.columns.push((at, reservation));
        }
        out
    }
}

/// Columns that a group's requirements and volumes allow, those of counted reservations among them: its levels are without.
pub(crate) fn usable(universe: &mut Universe<'_>, group: &Group) -> Bits {
    let mut bits = group.domains.clone();
    if !group.class.volume_terms.is_empty() {
        bits.and(&universe.constrained(&group.class.volume_terms, &group.class));
    }
    bits
}

impl Packer<'_, '_, '_> {
    /// Fills reservations of a tier, those that what is left fills best first.
    pub fn use_reserved(&mut self, reserved: &mut Reserved, tier: &Bits, active: &dyn Fn(usize) -> bool) {
        let columns: Vec<(usize, usize)> =
            reserved.columns.iter().copied().filter(|(column, _)| tier.contains(*column)).collect();
        if columns.is_empty() {
            return;
        }
        let allowed: Vec<Option<Bits>> =
            (0..self.stock.places.len()).map(|place| active(place).then(|| self.reservable(place))).collect();
        while !self.stock.is_empty() {
            let mut best: Option<(f64, usize, Bought)> = None;
            for (column, reservation) in columns.iter().copied() {
                let instance_type = Arc::clone(self.universe.instance_type(column));
                if reserved.left[reservation] <= 0
                    || !self.budgets[self.universe.pool(column)].allows(&instance_type.capacity)
                {
                    continue;
                }
                let buckets =
                    self.stock.open_buckets(|place| allowed[place].as_ref().is_some_and(|bits| bits.contains(column)));
                if buckets.is_empty() {
                    continue;
                }
                let host = self.daemon_host(column).clone();
                let bin = Bin { room: self.universe.room(column), host: &host, content: &[] };
                let content = self.stock.fill(&bin, &self.reference, &buckets, None, &[], 0);
                if content.is_empty() || !self.min_values_hold(column, &content) {
                    continue;
                }
                let load: f64 =
                    content.iter().map(|(item, n)| worth(self.stock.need(*item), &self.reference) * float(*n)).sum();
                let share = load / worth(self.universe.room(column), &self.reference).max(1.0);
                if best.as_ref().is_none_or(|(have, ..)| share > *have) {
                    best = Some((share, reservation, Bought { column, content }));
                }
            }
            let Some((_, reservation, bought)) = best else { return };
            self.buy_reserved(&mut reserved.left[reservation], bought);
        }
    }

    /// Buys a reserved node, and as many like it as the same pods fill.
    fn buy_reserved(&mut self, left: &mut i64, bought: Bought) {
        let instance_type: Arc<InstanceType> = Arc::clone(self.universe.instance_type(bought.column));
        let pool = self.universe.pool(bought.column);
        let most = bought.content.iter().map(|(item, count)| self.stock.items[*item].left / count).min().unwrap_or(0);
        let most = most.min(usize::try_from(*left).unwrap_or(0));
        let copies = self.budgets[pool].copies(&instance_type.capacity, most).max(1);
        *left -= i64::try_from(copies).unwrap_or(i64::MAX);
        self.budgets[pool].spend(&instance_type.capacity, copies);
        self.stock.take(&bought.content, copies);
        self.bought.extend(std::iter::repeat_n(bought, copies));
    }

    /// Columns of reservations and others that a place's requirements allow.
    pub fn reservable(&mut self, place: usize) -> Bits {
        let mut bits = usable(self.universe, &self.stock.groups[self.stock.places[place].sample]);
        for (key, domain) in &self.stock.places[place].pins {
            bits.and(&self.topology.keys[*key].columns[*domain]);
        }
        bits
    }
}
