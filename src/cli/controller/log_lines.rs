//! The log as JSON lines, with the field names that Karpenter's log has: what filters on them finds the same things in both.

use std::fmt;

use serde_json::{Map, Value, json};
use stowage_runtime::sync::heartbeat;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Writes each event as one line: level, time, module, message, the loop and its turn, and the fields of the event.
pub(super) struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        let (level, logger) = (event.metadata().level().as_str(), event.metadata().target());
        let [level, time, logger, message] =
            [level, &time, logger, &fields.message].map(|text| json!(text).to_string());
        write!(writer, r#"{{"level":{level},"time":{time},"logger":{logger},"message":{message}"#)?;
        if let Some(work) = heartbeat::current() {
            write!(writer, r#","controller":{}"#, json!(work.name))?;
            if let Some(turn) = work.turn {
                write!(writer, r#","reconcileID":"{turn}""#)?;
            }
        }
        for (name, value) in fields.others {
            write!(writer, ",{}:{value}", json!(name))?;
        }
        writeln!(writer, "}}")
    }
}

/// The fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        let field = field.name();
        if field == "message" {
            self.message = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            return;
        }
        self.others.push(match (field, value) {
            ("claim", Value::String(name)) => ("NodeClaim", named(name)),
            ("node", Value::String(name)) => ("Node", named(name)),
            ("node_pool", Value::String(name)) => ("NodePool", named(name)),
            ("class", Value::String(name)) => ("EC2NodeClass", named(name)),
            ("pod", Value::String(key)) => ("Pod", namespaced(&key)),
            ("instance_type", value) => ("instance-type", value),
            ("capacity_type", value) => ("capacity-type", value),
            (_, value) => (field, value),
        });
    }
}

fn named(name: String) -> Value {
    Value::Object(Map::from_iter([("name".to_owned(), Value::String(name))]))
}

/// `NAMESPACE/NAME` as an object.
fn namespaced(key: &str) -> Value {
    match key.split_once('/') {
        Some((namespace, name)) => json!({"name": name, "namespace": namespace}),
        None => json!({"name": key}),
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, json!(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, json!(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, json!(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, json!(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, json!(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, json!(value));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt;
    use k8s_openapi::jiff::{SignedDuration, Timestamp};
    use stowage_runtime::sync::heartbeat::Heartbeats;

    use super::*;
    use crate::cli::controller::logging::tests::Lines;

    /// The lines that `log` writes, each without its time.
    fn lines(log: impl FnOnce()) -> Vec<String> {
        let written = Lines::default();
        let output = written.clone();
        let logs = tracing_subscriber::fmt().event_format(JsonLines).with_writer(move || output.clone()).finish();
        tracing::subscriber::with_default(logs, log);
        let text = written.take();
        let without_time = |line: &str| {
            let mut object: Map<String, Value> = serde_json::from_str(line).unwrap();
            let time = object.remove("time").unwrap();
            assert!(line.contains(&format!(r#","time":{time},"logger":"#)), "{line}");
            let time: Timestamp = time.as_str().unwrap().parse().unwrap();
            assert!(Timestamp::now().duration_since(time).abs() < SignedDuration::from_mins(1));
            Value::Object(object).to_string()
        };
        text.lines().map(without_time).collect()
    }

    #[test]
    fn a_line_has_the_field_names_of_karpenter() {
        let found = lines(|| {
            let (claim, node, node_pool, class) = ("c-1", "n-1", String::from("p"), "default");
            tracing::info!(claim, node, node_pool, class, instance_type = "m5.large", capacity_type = %"spot", "launched");
            tracing::warn!(
                pod = "space/web",
                called_ms = Some(7_u64),
                usd = 0.25,
                gone = None::<u64>,
                ok = true,
                "a pod"
            );
        });
        insta::assert_snapshot!(found.join("\n"), @r#"
        {"EC2NodeClass":{"name":"default"},"Node":{"name":"n-1"},"NodeClaim":{"name":"c-1"},"NodePool":{"name":"p"},"capacity-type":"spot","instance-type":"m5.large","level":"INFO","logger":"stowage::cli::controller::log_lines::tests","message":"launched"}
        {"Pod":{"name":"web","namespace":"space"},"called_ms":7,"level":"WARN","logger":"stowage::cli::controller::log_lines::tests","message":"a pod","ok":true,"usd":0.25}
        "#);
    }

    #[test]
    fn hostile_text_stays_within_its_line_and_its_field() {
        let found = lines(|| {
            let text = "\"}\n{\"level\":\"ERROR\u{1b}[2J\u{2028}";
            tracing::error!(error = text, claim = text, share = f64::NAN, big = u64::MAX, "message {text}");
        });
        assert_eq!(found.len(), 1);
        let line: Value = serde_json::from_str(&found[0]).unwrap();
        let text = "\"}\n{\"level\":\"ERROR\u{1b}[2J\u{2028}";
        assert_eq!(line["error"], text);
        assert_eq!(line["NodeClaim"], json!({"name": text}));
        assert_eq!(line["message"], format!("message {text}"));
        assert_eq!((&line["share"], &line["big"]), (&Value::Null, &json!(u64::MAX)));
    }

    #[test]
    fn lines_of_one_turn_of_a_loop_have_its_name_and_one_identifier() {
        let found = lines(|| {
            let heartbeats = Heartbeats::default();
            let turns = heartbeats.run("lifecycle", Duration::from_mins(1), async {
                tracing::info!("first");
                tracing::info!("second");
                heartbeat::rest(async { tracing::info!("between") }).await;
                tracing::info!("third");
            });
            turns.now_or_never().unwrap();
            tracing::info!("outside");
        });
        let found: Vec<Value> = found.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (ids, names): (Vec<&Value>, Vec<&Value>) =
            found.iter().map(|line| (&line["reconcileID"], &line["controller"])).unzip();
        assert_eq!(
            names,
            [&json!("lifecycle"), &json!("lifecycle"), &json!("lifecycle"), &json!("lifecycle"), &Value::Null]
        );
        assert!(ids[0].as_str().is_some_and(|id| id.len() == 36) && ids[0] == ids[1] && ids[0] != ids[3], "{ids:?}");
        assert_eq!([ids[2], ids[4]], [&Value::Null; 2]);
    }
}
