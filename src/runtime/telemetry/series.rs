//! Prometheus' text format for series that no collector keeps, because they are made of the state at each scrape.

use std::fmt::Write as _;

use crate::telemetry::metric::{Kind, Metric};

/// The lines that precede the series of a gauge.
pub fn head(metric: &Metric) -> String {
    debug_assert_eq!(metric.kind, Kind::Gauge);
    format!("# HELP {} {}\n# TYPE {} gauge\n", metric.name, metric.help, metric.name)
}

/// Adds a label to those of a series. A label without a value is left out: to Prometheus it is absent.
pub fn label(labels: &mut String, name: &str, value: &str) {
    if value.is_empty() {
        return;
    }
    let separator = if labels.is_empty() { "" } else { "," };
    labels.extend([separator, name, "=\""]);
    if value.bytes().any(|byte| matches!(byte, b'\\' | b'"' | b'\n')) {
        labels.push_str(&value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"));
    } else {
        labels.push_str(value);
    }
    labels.push('"');
}

/// Adds the sample of a series.
pub fn sample(text: &mut String, metric: &Metric, labels: &str, value: f64) {
    let _ = writeln!(text, "{}{{{labels}}} {value}", metric.name);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::registry::NODES_ALLOCATABLE;

    #[test]
    fn labels_are_escaped_and_empty_ones_left_out() {
        let mut labels = String::new();
        label(&mut labels, "a", "");
        label(&mut labels, "b", "x\"y\\z\n");
        label(&mut labels, "c", "d,e}");
        let mut text = head(NODES_ALLOCATABLE);
        sample(&mut text, NODES_ALLOCATABLE, &labels, 1.5);
        sample(&mut text, NODES_ALLOCATABLE, "", 16_000_000_000.0);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1..],
            [
                "# TYPE karpenter_nodes_allocatable gauge",
                r#"karpenter_nodes_allocatable{b="x\"y\\z\n",c="d,e}"} 1.5"#,
                "karpenter_nodes_allocatable{} 16000000000",
            ]
        );
    }
}
