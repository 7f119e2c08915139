//! The columns of the covering problem: every node that can be purchased, one column per NodePool variant, instance type, zone and capacity
//! type, with its complete labels and the room that its daemons leave.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use stowage_api::parse_requirements;
use stowage_model::labels;
use stowage_model::offering::{CapacityType, InstanceType, OFFERING_LABELS, Offering};
use stowage_model::pod_class::PodClass;
use stowage_model::requirement::ValueSet;
use stowage_model::resources::Resources;

use crate::columns::bitset::Bits;
use crate::columns::daemons::{DaemonNeed, add, by_precedence, counted};
use crate::columns::dims::{Dims, fits};
use crate::columns::variants::{
    Mentioned, Variant, combinations, dedicated_is_requested, expand, expand_combinations, has_key, is_crowded,
    mentioned_values, tenancies, well_known,
};
use crate::input::pod::Labels;
use crate::input::pool::Pool;
use crate::input::problem::Problem;
use crate::input::settings::PlanSettings;

/// An instance type of a variant.
#[derive(Debug)]
pub(crate) struct Shape {
    pub variant: usize,
    pub instance_type: Arc<InstanceType>,
    /// Columns `first..end` are its offerings.
    pub first: usize,
    pub end: usize,
}

/// A kind of node that can be purchased.
#[derive(Debug)]
pub(crate) struct Column {
    pub shape: usize,
    pub zone: Arc<str>,
    pub capacity_type: CapacityType,
    /// Coefficient in the objective, micro-USD per hour.
    pub price: i64,
    /// Price that is paid, micro-USD per hour.
    pub paid: i64,
    /// Instances left in a counted reservation; `None` is unlimited.
    pub left: Option<i64>,
    /// Labels of the offering alone.
    pub labels: Arc<BTreeMap<String, String>>,
}

/// What a node counts for the limits of its NodePool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge<'a> {
    pub capacity: &'a Resources,
    /// As paid, in micro-USD per hour.
    pub price: i64,
}

/// All columns.
#[derive(Debug, Default)]
pub(crate) struct ColumnTable {
    pub dims: Dims,
    pub variants: Vec<Variant>,
    pub shapes: Vec<Shape>,
    pub columns: Vec<Column>,
    /// Columns in ascending order of price; ties by capacity type, instance type and zone.
    pub by_price: Vec<usize>,
    /// The columns of each NodePool, in that order.
    of_pool: Vec<Vec<usize>>,
    /// Position of each column in `by_price`.
    pub rank: Vec<usize>,
    /// Columns of equal room and price: the kind of each column, and the first column of each kind, in ascending order of price.
    pub kind: Vec<usize>,
    pub kinds: Vec<usize>,
    /// Maximum room per dimension over the columns up to each position of `by_price`; `dims.len()` numbers per position.
    most: Vec<i64>,
    /// Room of each column for pods, after daemons; `dims.len()` numbers per column.
    room: Vec<i64>,
    /// Allocatable resources of types without an available offering, by variant.
    unavailable: HashMap<usize, Vec<Vec<i64>>>,
    /// Daemons of each column, as an index into `daemon_sets`.
    daemon_set: Vec<usize>,
    /// Distinct sets of daemons: their requests and members.
    daemon_sets: Vec<(Vec<i64>, Vec<usize>)>,
    /// NodePools with a `PreferNoSchedule` taint.
    pub soft_tainted: Vec<usize>,
    /// Whether some column is a counted reservation.
    pub has_counted: bool,
}

/// The column table of the last plan, reused while its inputs are unchanged. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct ColumnCache(Arc<Mutex<Option<(TableInputs, Arc<ColumnTable>)>>>);

/// Whether they are clones of one cache.
impl PartialEq for ColumnCache {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl ColumnCache {
    /// The table of these inputs: the cached table, or else a new table.
    pub(crate) fn column_table(
        &self,
        inputs: TableInputs,
        make: impl FnOnce(&TableInputs) -> ColumnTable,
    ) -> Arc<ColumnTable> {
        // Each holder leaves the entry complete: after a panic it is still of use.
        let mut entry = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, table)) = entry.as_ref().filter(|(cached, _)| cached.matches(&inputs)) {
            return Arc::clone(table);
        }
        let table = Arc::new(make(&inputs));
        *entry = Some((inputs, Arc::clone(&table)));
        table
    }
}

/// The inputs of a [`ColumnTable`].
#[derive(Debug)]
pub(crate) struct TableInputs {
    pools: Vec<Pool>,
    daemons: Vec<Arc<PodClass>>,
    settings: PlanSettings,
    dims: Dims,
    mentioned: HashMap<Arc<str>, Mentioned>,
    /// What pods want of open labels; empty where every combination gets a variant.
    combinations: Vec<Labels>,
    dedicated: bool,
}

impl TableInputs {
    pub fn of(problem: &Problem) -> Self {
        let mentioned = mentioned_values(problem);
        let crowded = is_crowded(&problem.pools, &mentioned);
        Self {
            pools: problem.pools.clone(),
            daemons: problem.daemons.iter().map(|daemon| Arc::clone(&daemon.class)).collect(),
            settings: problem.settings.clone(),
            dims: Dims::of(problem),
            mentioned,
            combinations: if crowded { combinations(problem) } else { Vec::new() },
            dedicated: dedicated_is_requested(problem),
        }
    }

    fn matches(&self, other: &Self) -> bool {
        let same_pool = |(a, b): (&Pool, &Pool)| {
            Arc::ptr_eq(&a.catalog, &b.catalog)
                && a.labels == b.labels
                && a.requirements == b.requirements
                && a.taints == b.taints
        };
        self.pools.len() == other.pools.len()
            && self.pools.iter().zip(&other.pools).all(same_pool)
            && self.daemons.len() == other.daemons.len()
            && self.daemons.iter().zip(&other.daemons).all(|(a, b)| Arc::ptr_eq(a, b))
            && self.settings == other.settings
            && self.dims == other.dims
            && self.mentioned == other.mentioned
            && self.combinations == other.combinations
            && self.dedicated == other.dedicated
    }
}

impl ColumnTable {
    /// The table without daemons.
    pub fn bare(problem: &Problem, inputs: &TableInputs) -> Self {
        let mut table = Self { dims: inputs.dims.clone(), ..Self::default() };
        for (at, pool) in problem.pools_by_name() {
            if pool.taints.iter().any(|t| t.effect == "PreferNoSchedule") {
                table.soft_tainted.push(at);
            }
            table.add_pool(problem, at, inputs);
        }
        table
    }

    /// Subtracts the daemons, given by their requests and the columns that they run on, and sorts by price.
    pub fn complete(&mut self, daemons: &[DaemonNeed]) {
        self.subtract_daemons(daemons);
        let mut by_price: Vec<usize> = (0..self.columns.len()).collect();
        by_price.sort_by(|a, b| {
            let key = |c: &usize| {
                let column = &self.columns[*c];
                (column.price, column.capacity_type, &self.instance_type(*c).name, &column.zone, *c)
            };
            key(a).cmp(&key(b))
        });
        self.rank = vec![0; by_price.len()];
        for (rank, column) in by_price.iter().enumerate() {
            self.rank[*column] = rank;
        }
        let mut most = vec![i64::MIN; self.dims.len()];
        for column in &by_price {
            most.iter_mut().zip(self.room(*column)).for_each(|(most, room)| *most = (*most).max(*room));
            self.most.extend_from_slice(&most);
        }
        self.number_kinds(&by_price);
        self.of_pool = vec![Vec::new(); self.variants.iter().map(|variant| variant.pool + 1).max().unwrap_or(0)];
        for column in &by_price {
            let pool = self.pool(*column);
            self.of_pool[pool].push(*column);
        }
        self.by_price = by_price;
        self.has_counted = self.columns.iter().any(|column| column.left.is_some());
    }

    fn number_kinds(&mut self, by_price: &[usize]) {
        let mut ids: HashMap<(i64, &[i64]), usize> = HashMap::new();
        let mut kind = vec![0; self.columns.len()];
        let mut kinds = Vec::new();
        for column in by_price {
            kind[*column] = *ids.entry((self.columns[*column].price, self.room(*column))).or_insert_with(|| {
                kinds.push(*column);
                kinds.len() - 1
            });
        }
        drop(ids);
        (self.kind, self.kinds) = (kind, kinds);
    }

    fn add_pool(&mut self, problem: &Problem, at: usize, inputs: &TableInputs) {
        let TableInputs { mentioned, combinations, dedicated, .. } = inputs;
        let dedicated = *dedicated;
        let (pool, settings) = (&problem.pools[at], &problem.settings);
        // An invalid pool offers nothing; `Pool::new` reports why.
        let Ok(requirements) = parse_requirements(&pool.requirements) else {
            return;
        };
        let mut known: Vec<(&Arc<str>, &ValueSet)> = Vec::new();
        let mut open: Vec<(&Arc<str>, &ValueSet)> = Vec::new();
        let mut variants = vec![Variant { pool: at, labels: pool.labels.clone(), pinned: Vec::new() }];
        for (key, set) in requirements.iter() {
            if let Some(value) = pool.labels.get(key.as_ref()) {
                if !set.contains(value) {
                    return;
                }
            } else if key.as_ref() == labels::INSTANCE_TENANCY {
                variants = tenancies(variants, Some(set), dedicated);
            } else if well_known(key) || pool.catalog.instance_types.iter().any(|t| t.labels.contains_key(key.as_ref()))
            {
                known.push((key, set));
            } else if combinations.is_empty() {
                variants = expand(variants, key, set, mentioned.get(key));
            } else {
                open.push((key, set));
            }
        }
        if !combinations.is_empty() {
            variants = expand_combinations(&variants, &open, mentioned, combinations);
        }
        if dedicated && !has_key(pool, &requirements, labels::INSTANCE_TENANCY) {
            variants = tenancies(variants, None, true);
        }
        let inputs = |key: &'static str| (key, pool.labels.get(key), requirements.get(key));
        let drawn: Vec<_> = (OFFERING_LABELS.into_iter().map(inputs))
            .filter(|(_, fixed, set)| fixed.is_some() || set.is_some())
            .collect();
        for variant in variants {
            let index = self.variants.len();
            self.variants.push(variant);
            for instance_type in &pool.catalog.instance_types {
                let admits = |(key, set): &(&Arc<str>, &ValueSet)| {
                    OFFERING_LABELS.contains(&key.as_ref())
                        || set.accepts(instance_type.labels.get(key.as_ref()).map(String::as_str))
                };
                if !known.iter().all(admits) || !settings.node_sizes.allow(instance_type.capacity.cpu) {
                    continue;
                }
                let family = instance_type.labels.get(labels::INSTANCE_FAMILY).map(String::as_str);
                let first = self.columns.len();
                let wanted = |offering: &Offering| {
                    drawn.iter().all(|(key, fixed, set)| {
                        let value = offering.label(key);
                        fixed.is_none_or(|fixed| Some(fixed.as_str()) == value)
                            && set.is_none_or(|set| set.accepts(value))
                    })
                };
                for offering in instance_type.offerings.iter().filter(|o| o.available) {
                    if wanted(offering) {
                        self.columns.push(Column {
                            shape: self.shapes.len(),
                            zone: Arc::clone(&offering.zone),
                            capacity_type: offering.capacity_type,
                            price: settings.compared_price(offering.price_at_risk(), family),
                            paid: offering.price.0.max(0),
                            left: offering.left,
                            labels: Arc::clone(&offering.labels),
                        });
                    }
                }
                if self.columns.len() == first && instance_type.offerings.iter().any(wanted) {
                    self.unavailable.entry(index).or_default().push(self.dims.dense_of(instance_type));
                }
                if self.columns.len() > first {
                    self.shapes.push(Shape {
                        variant: index,
                        instance_type: Arc::clone(instance_type),
                        first,
                        end: self.columns.len(),
                    });
                }
            }
        }
    }

    /// A daemon that requests a device that a column lacks stays pending there and takes no room. A column that cannot hold all its daemons
    /// has no room for pods: such a node would run without some of them. A daemon that no type of a variant has room for, alone or with
    /// those of higher precedence, does not count in that variant: it stays pending there, whatever is purchased.
    fn subtract_daemons(&mut self, daemons: &[DaemonNeed]) {
        let dims = self.dims.len();
        let allocatable: Vec<Vec<i64>> =
            self.shapes.iter().map(|shape| self.dims.dense_of(&shape.instance_type)).collect();
        let order = by_precedence(daemons, &allocatable);
        let mut sets: HashMap<Vec<usize>, usize> = HashMap::new();
        let (mut daemon_sets, mut daemon_set) = (Vec::new(), Vec::with_capacity(self.columns.len()));
        let mut room = Vec::with_capacity(self.columns.len() * dims);
        let mut first = 0;
        for shapes in self.shapes.chunk_by(|a, b| a.variant == b.variant) {
            let allocatable = &allocatable[first..first + shapes.len()];
            first += shapes.len();
            let unavailable = self.unavailable.get(&shapes[0].variant).map_or(&[][..], Vec::as_slice);
            let columns = || {
                shapes
                    .iter()
                    .zip(allocatable)
                    .flat_map(|(shape, have)| (shape.first..shape.end).map(move |c| (c, have)))
            };
            let counted = counted(daemons, &order, columns(), unavailable, dims);
            for (column, have) in columns() {
                let mut members: Vec<usize> =
                    counted.iter().copied().filter(|daemon| daemons[*daemon].runs_on(column, have)).collect();
                members.sort_unstable();
                let set = *sets.entry(members).or_insert_with_key(|members| {
                    let mut sum = vec![0; dims];
                    for daemon in members {
                        add(&mut sum, &daemons[*daemon].need);
                    }
                    daemon_sets.push((sum, members.clone()));
                    daemon_sets.len() - 1
                });
                daemon_set.push(set);
                let (overhead, _) = &daemon_sets[set];
                let holds = fits(overhead, have);
                room.extend(have.iter().zip(overhead).map(|(have, less)| if holds { have - less } else { 0 }));
            }
        }
        (self.daemon_sets, self.daemon_set, self.room) = (daemon_sets, daemon_set, room);
    }

    /// The columns of a NodePool that may hold `load`, in ascending order of price; columns of other NodePools may be among them.
    pub fn by_price_in(&self, pool: usize, load: &[i64]) -> &[usize] {
        let all = self.by_price_for(load);
        self.of_pool.get(pool).filter(|of_pool| of_pool.len() < all.len()).map_or(all, Vec::as_slice)
    }

    /// The suffix of `by_price` after the columns that all lack room for `load` in some dimension: binary search on the running maxima.
    pub fn by_price_for(&self, load: &[i64]) -> &[usize] {
        let dims = self.dims.len();
        let (mut first, mut end) = (0, self.by_price.len());
        while first < end {
            let middle = usize::midpoint(first, end);
            if fits(load, &self.most[middle * dims..(middle + 1) * dims]) {
                end = middle;
            } else {
                first = middle + 1;
            }
        }
        &self.by_price[first..]
    }

    /// Room of a column for pods.
    pub fn room(&self, column: usize) -> &[i64] {
        let dims = self.dims.len();
        &self.room[column * dims..(column + 1) * dims]
    }

    /// Requests of the daemons that will run on a column.
    pub fn overhead(&self, column: usize) -> &[i64] {
        &self.daemon_sets[self.daemon_set[column]].0
    }

    /// Daemons that will run on a column.
    pub fn daemons(&self, column: usize) -> &[usize] {
        &self.daemon_sets[self.daemon_set[column]].1
    }

    /// Identity of a column's set of daemons.
    pub fn daemon_set(&self, column: usize) -> usize {
        self.daemon_set[column]
    }

    pub fn instance_type(&self, column: usize) -> &Arc<InstanceType> {
        &self.shapes[self.columns[column].shape].instance_type
    }

    /// What a node of a column counts for limits.
    pub fn charge(&self, column: usize) -> Charge<'_> {
        Charge { capacity: &self.instance_type(column).capacity, price: self.columns[column].paid }
    }

    pub fn variant(&self, column: usize) -> &Variant {
        &self.variants[self.shapes[self.columns[column].shape].variant]
    }

    pub fn pool(&self, column: usize) -> usize {
        self.variant(column).pool
    }

    /// The value of a label; `None` where the column has no such label. The host name is unknown before launch.
    pub fn label(&self, column: usize, key: &str) -> Option<&str> {
        match key {
            labels::ZONE => Some(&self.columns[column].zone),
            labels::CAPACITY_TYPE => Some(self.columns[column].capacity_type.as_str()),
            key if OFFERING_LABELS.contains(&key) => self.columns[column].labels.get(key).map(String::as_str),
            _ => self.shape_label(self.columns[column].shape, key),
        }
    }

    pub fn shape_label(&self, shape: usize, key: &str) -> Option<&str> {
        let shape = &self.shapes[shape];
        match key {
            labels::REGISTERED | labels::INITIALIZED => Some("true"),
            _ => self.variants[shape.variant]
                .labels
                .get(key)
                .or_else(|| shape.instance_type.labels.get(key))
                .map(String::as_str),
        }
    }

    /// Columns that satisfy a predicate.
    pub fn where_column(&self, accept: impl Fn(usize) -> bool) -> Bits {
        let mut bits = Bits::empty(self.columns.len());
        (0..self.columns.len()).filter(|column| accept(*column)).for_each(|column| bits.insert(column));
        bits
    }
}
