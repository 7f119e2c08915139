//! Summaries, which the client library has no collector of: quantiles of the last ten minutes, and the sum and count of all observations, as Karpenter's
//! client library makes them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use prometheus::core::{Collector, Desc};
use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType, Quantile, Summary};
use sketches_ddsketch::{Config, DDSketch};

use crate::sync::lock;

/// The quantiles that are published: those of Karpenter, and 0.95, which common dashboards show.
const QUANTILES: [f64; 6] = [0.0, 0.5, 0.9, 0.95, 0.99, 1.0];
/// Quantiles are of the last [`WINDOWS`] windows of this length.
const WINDOW: Duration = Duration::from_mins(2);
const WINDOWS: u128 = 5;
/// Relative error of a quantile: 0 and 1 have none.
const ERROR: f64 = 0.01;
/// Values below count as 0: durations in seconds.
const LEAST: f64 = 0.001;
/// Bins of a sketch: values from [`LEAST`] to 10^14 have one each.
const BINS: u32 = 2_048;

/// Summaries by label. Cheap to clone; clones share their values.
#[derive(Clone)]
pub struct SummaryVec {
    desc: Desc,
    begun: Instant,
    series: Arc<Mutex<BTreeMap<Vec<String>, Series>>>,
}

impl std::fmt::Debug for SummaryVec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SummaryVec").field("name", &self.desc.fq_name).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Series {
    count: u64,
    sum: f64,
    /// The observations of a window, by the number of the window.
    windows: BTreeMap<u128, DDSketch>,
}

impl Series {
    fn observe(&mut self, value: f64, now: Duration) {
        self.count += 1;
        self.sum += value;
        self.forget(now);
        self.windows.entry(window(now)).or_insert_with(empty).add(value);
    }

    fn forget(&mut self, now: Duration) {
        self.windows.retain(|number, _| number + WINDOWS > window(now));
    }

    fn summary(&mut self, now: Duration) -> Summary {
        self.forget(now);
        let mut all = empty();
        // An error: their configurations differ.
        self.windows.values().for_each(|window| drop(all.merge(window)));
        // An estimate may be beyond the extremes, which are exact.
        let (least, most) = (all.min().unwrap_or(f64::MIN), all.max().unwrap_or(f64::MAX));
        let within = |value: f64| value.max(least).min(most);
        let quantile = |quantile: f64| {
            let value = all.quantile(quantile).ok().flatten().map_or(f64::NAN, within);
            let mut out = Quantile::default();
            out.set_quantile(quantile);
            out.set_value(value);
            out
        };
        let mut out = Summary::default();
        out.set_sample_count(self.count);
        out.set_sample_sum(self.sum);
        out.set_quantile(QUANTILES.map(quantile).to_vec());
        out
    }
}

/// The number of the window at a time since the begin.
fn window(at: Duration) -> u128 {
    at.as_millis() / WINDOW.as_millis()
}

fn empty() -> DDSketch {
    DDSketch::new(Config::new(ERROR, BINS, LEAST))
}

impl SummaryVec {
    pub(super) fn new(desc: Desc) -> Self {
        Self { desc, begun: Instant::now(), series: Arc::default() }
    }

    /// Adds a duration to the summary with these values of the labels.
    ///
    /// # Panics
    /// In a debug build if their number is another than that of the labels.
    pub fn observe(&self, labels: &[&str], time: Duration) {
        self.observe_at(labels, time.as_secs_f64(), self.begun.elapsed());
    }

    fn observe_at(&self, labels: &[&str], value: f64, now: Duration) {
        debug_assert_eq!(labels.len(), self.desc.variable_labels.len());
        let key = labels.iter().map(|label| (*label).to_owned()).collect();
        lock(&self.series).entry(key).or_default().observe(value, now);
    }

    fn collect_at(&self, now: Duration) -> Vec<MetricFamily> {
        let metric = |(values, series): (&Vec<String>, &mut Series)| {
            let pair = |(name, value): (&String, &String)| {
                let mut pair = LabelPair::default();
                pair.set_name(name.clone());
                pair.set_value(value.clone());
                pair
            };
            let mut metric = Metric::from_label(self.desc.variable_labels.iter().zip(values).map(pair).collect());
            metric.set_summary(series.summary(now));
            metric
        };
        let mut family = MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.desc.help.clone());
        family.set_field_type(MetricType::SUMMARY);
        family.set_metric(lock(&self.series).iter_mut().map(metric).collect());
        vec![family]
    }
}

impl Collector for SummaryVec {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.collect_at(self.begun.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use prometheus::TextEncoder;

    use super::*;
    use crate::telemetry::registry::NODES_TERMINATION_SECONDS;

    fn text(summaries: &SummaryVec, now: Duration) -> Vec<String> {
        let text = TextEncoder::new().encode_to_string(&summaries.collect_at(now)).unwrap();
        text.lines().filter(|line| !line.starts_with("# HELP")).map(str::to_owned).collect()
    }

    #[test]
    fn no_quantile_is_beyond_the_extremes() {
        let summaries = NODES_TERMINATION_SECONDS.summaries();
        for seconds in [5.0, 5.0, 4.97, 5.0] {
            summaries.observe_at(&["p"], seconds, Duration::ZERO);
        }
        let values = text(&summaries, Duration::ZERO);
        let values =
            values[1..=QUANTILES.len()].iter().map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
        let values: Vec<f64> = values.collect();
        assert!(values.is_sorted() && values.iter().all(|value| (4.97..=5.0).contains(value)), "{values:?}");
    }

    #[test]
    fn a_summary_has_the_quantiles_of_ten_minutes_and_the_sum_of_all() {
        let summaries = NODES_TERMINATION_SECONDS.summaries();
        let begin = Duration::from_mins(10);
        for second in 1..=100 {
            summaries.observe_at(&["p"], f64::from(second), begin);
        }
        summaries.observe_at(&["q"], 0.0, begin);
        let lines = text(&summaries, begin);
        let (name, of) = ("karpenter_nodes_termination_duration_seconds", "nodepool=\"p\",quantile");
        assert_eq!(lines[0], format!("# TYPE {name} summary"));
        assert_eq!(lines[1], format!("{name}{{{of}=\"0\"}} 1"));
        let value = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
        for (line, quantile, expected) in [(2, "0.5", 50.0), (3, "0.9", 90.0), (4, "0.95", 95.0), (5, "0.99", 99.0)] {
            assert!(lines[line].starts_with(&format!("{name}{{{of}=\"{quantile}\"}} ")), "{}", lines[line]);
            assert!((value(&lines[line]) / expected - 1.0).abs() < 2.0 * ERROR, "{}", lines[line]);
        }
        let of_p = [
            format!("{name}{{{of}=\"1\"}} 100"),
            format!("{name}_sum{{nodepool=\"p\"}} 5050"),
            format!("{name}_count{{nodepool=\"p\"}} 100"),
        ];
        assert_eq!(lines[6..9], of_p);
        assert_eq!(lines[10], format!("{name}{{nodepool=\"q\",quantile=\"0.5\"}} 0"));
        // The observations of one window remain, then none.
        summaries.observe_at(&["p"], 7.0, begin + WINDOW);
        let one = text(&summaries, begin + WINDOW * 5);
        assert_eq!((value(&one[1]), value(&one[6]), value(&one[8])), (7.0, 7.0, 101.0));
        let none = text(&summaries, begin + WINDOW * 6);
        assert_eq!(none[1], format!("{name}{{{of}=\"0\"}} NaN"));
        assert_eq!(none[8], format!("{name}_count{{nodepool=\"p\"}} 101"));
    }
}
