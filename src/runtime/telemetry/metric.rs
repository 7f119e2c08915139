//! The declaration of a metric, and the collectors that are made from it.

use std::collections::HashMap;

use prometheus::core::{Collector, Desc};
use prometheus::{
    CounterVec, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry,
};

use crate::telemetry::summary::SummaryVec;

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Increases only.
    Counter,
    /// Increases and decreases.
    Gauge,
    /// Observations in these buckets.
    Histogram(&'static [f64]),
    /// Quantiles of observations.
    Summary,
}

/// Which replica populates a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Every replica.
    Serving,
    /// The leader.
    Leader,
    /// The leader: series for each node or pod, which no collector keeps.
    Objects,
    /// The leader, with `--cloud ec2`; names and labels of Karpenter's AWS provider.
    Ec2,
}

/// A label and its values.
pub type Label = (&'static str, &'static str);

/// Under which names metrics are published that have a name of Karpenter's and one of ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum MetricNames {
    /// Under both.
    #[default]
    Both,
    /// With the prefix `karpenter_`.
    Karpenter,
    /// With the prefix `stowage_`.
    Stowage,
}

/// One metric.
#[derive(Debug)]
pub struct Metric {
    /// Full name.
    pub name: &'static str,
    /// Karpenter's name, if that is another.
    pub karpenter: Option<&'static str>,
    /// Type.
    pub kind: Kind,
    /// Which replica populates it.
    pub source: Source,
    /// Labels in the order in which collectors take their values.
    pub labels: &'static [Label],
    /// Help text: a sentence.
    pub help: &'static str,
}

impl Metric {
    fn names(&self) -> Vec<&'static str> {
        self.labels.iter().map(|(name, _)| *name).collect()
    }

    fn options(&self) -> Opts {
        Opts::new(self.name, self.help)
    }

    fn buckets(&self) -> HistogramOpts {
        let Kind::Histogram(buckets) = self.kind else { unreachable!("{} is declared as {:?}", self.name, self.kind) };
        HistogramOpts::new(self.name, self.help).buckets(buckets.to_vec())
    }

    fn made<C>(&self, collector: Result<C, prometheus::Error>) -> C {
        collector.unwrap_or_else(|error| unreachable!("{} is well formed; a test verifies it: {error}", self.name))
    }

    /// A counter without labels.
    pub fn counter(&self) -> IntCounter {
        self.made(IntCounter::with_opts(self.options()))
    }

    /// Counters by label.
    pub fn counters(&self) -> IntCounterVec {
        self.made(IntCounterVec::new(self.options(), &self.names()))
    }

    /// Counters of amounts, by label.
    pub fn float_counters(&self) -> CounterVec {
        self.made(CounterVec::new(self.options(), &self.names()))
    }

    /// An integer gauge without labels.
    pub fn gauge(&self) -> IntGauge {
        self.made(IntGauge::with_opts(self.options()))
    }

    /// Integer gauges by label.
    pub fn gauges(&self) -> IntGaugeVec {
        self.made(IntGaugeVec::new(self.options(), &self.names()))
    }

    /// Floating-point gauges by label.
    pub fn float_gauges(&self) -> GaugeVec {
        self.made(GaugeVec::new(self.options(), &self.names()))
    }

    /// A histogram without labels.
    pub fn histogram(&self) -> Histogram {
        self.made(Histogram::with_opts(self.buckets()))
    }

    /// Summaries by label, or one without labels.
    pub fn summaries(&self) -> SummaryVec {
        let names = self.names().into_iter().map(str::to_owned).collect();
        SummaryVec::new(self.made(Desc::new(self.name.to_owned(), self.help.to_owned(), names, HashMap::new())))
    }

    /// Histograms by label.
    pub fn histograms(&self) -> HistogramVec {
        self.made(HistogramVec::new(self.buckets(), &self.names()))
    }
}

/// Registers and returns a collector.
///
/// # Errors
/// A metric with the same name is already registered.
pub fn register<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> Result<C, prometheus::Error> {
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
}
