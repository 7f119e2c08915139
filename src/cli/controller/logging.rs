//! The log: its format, and its level, which the ConfigMap of the emergency stop can change while the process runs.

use std::io;
use std::sync::Mutex;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use stowage_model::pause;
use stowage_runtime::sync::lock;
use tracing_subscriber::fmt::writer::{BoxMakeWriter, MakeWriterExt};
use tracing_subscriber::{EnvFilter, reload};

use crate::cli::controller::arguments::{LogFormat, LogLevel, LogOutput};
use crate::cli::controller::log_lines::JsonLines;

/// Maximum number of characters of an invalid level in the log.
const SHOWN_CHARS: usize = 50;

/// Writes a filter into the subscriber.
type Reload = Box<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>;

/// The level of the log.
pub(crate) struct LogControl {
    /// The level of the setting.
    setting: LogLevel,
    reload: Reload,
    /// The value that was last read, valid or not: each is applied and reported once.
    last: Mutex<Option<String>>,
}

impl LogControl {
    /// Starts logging.
    pub(crate) fn install(setting: LogLevel, format: LogFormat, outputs: &[LogOutput]) -> Self {
        let logs = tracing_subscriber::fmt().with_env_filter(filter(setting)).with_writer(writer(outputs));
        let reload: Reload = match format {
            LogFormat::Json => {
                let logs = logs.event_format(JsonLines).with_filter_reloading();
                let handle = logs.reload_handle();
                logs.init();
                Box::new(move |filter| handle.reload(filter))
            }
            LogFormat::Text => {
                let logs = logs.with_ansi(false).with_filter_reloading();
                let handle = logs.reload_handle();
                logs.init();
                Box::new(move |filter| handle.reload(filter))
            }
        };
        Self { setting, reload, last: Mutex::default() }
    }

    /// Applies the level of the ConfigMap: `None`, and a value that is not a level, select the level of the setting.
    pub(crate) fn apply(&self, value: Option<&str>) {
        let mut last = lock(&self.last);
        if last.as_deref() == value {
            return;
        }
        *last = value.map(str::to_owned);
        let parsed = value.map(|value| LogLevel::from_str(value.trim(), false));
        let level = parsed.clone().and_then(Result::ok).unwrap_or(self.setting);
        if let Err(error) = (self.reload)(filter(level)) {
            tracing::error!(%error, "log level could not be changed");
            return;
        }
        if let (Some(value), Some(Err(_))) = (value, parsed) {
            let value: String = value.chars().take(SHOWN_CHARS).collect();
            let expected = "debug, info, warn or error";
            // An error, so that it is seen at every level.
            tracing::error!(
                config_map = pause::NAME,
                key = pause::LOG_LEVEL_KEY,
                value,
                expected,
                "invalid log level ignored"
            );
        }
        let log_level = level.to_possible_value();
        tracing::warn!(log_level = log_level.as_ref().map(PossibleValue::get_name), "log level changed");
    }
}

fn writer(outputs: &[LogOutput]) -> BoxMakeWriter {
    match [LogOutput::Stdout, LogOutput::Stderr].map(|output| outputs.contains(&output)) {
        [true, true] => BoxMakeWriter::new(io::stdout.and(io::stderr)),
        [true, false] => BoxMakeWriter::new(io::stdout),
        [false, _] => BoxMakeWriter::new(io::stderr),
    }
}

/// What is logged at a level: of dependencies, warnings only, and at `debug` actions. A directive matches all targets that begin with
/// its text: `stowage` those of all crates of the service.
fn filter(level: LogLevel) -> EnvFilter {
    let directives = match level {
        LogLevel::Debug => "stowage=debug,info",
        LogLevel::Info => "stowage=info,warn",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
    };
    EnvFilter::new(directives)
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;

    /// What a log under test has written. Clones share it.
    #[derive(Clone, Default)]
    pub struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Lines {
        /// The text since the last call.
        pub fn take(&self) -> String {
            String::from_utf8(std::mem::take(&mut *lock(&self.0))).unwrap()
        }
    }

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn actions_of_all_crates_of_the_service_are_logged_and_of_dependencies_warnings_only() {
        let logs = tracing_subscriber::fmt().with_env_filter(filter(LogLevel::Info)).with_writer(io::sink);
        tracing::subscriber::with_default(logs.finish(), || {
            assert!(tracing::enabled!(target: "stowage::controllers", tracing::Level::INFO));
            assert!(tracing::enabled!(target: "stowage_cloud::ec2::launch", tracing::Level::INFO));
            assert!(!tracing::enabled!(target: "stowage_cloud::ec2::launch", tracing::Level::DEBUG));
            assert!(!tracing::enabled!(target: "kube_client::client", tracing::Level::INFO));
            assert!(tracing::enabled!(target: "kube_client::client", tracing::Level::WARN));
        });
    }

    #[test]
    fn the_level_follows_the_config_map_and_an_invalid_one_is_reported_once() {
        let lines = Lines::default();
        let written = lines.clone();
        let logs = tracing_subscriber::fmt().with_env_filter(filter(LogLevel::Error)).with_ansi(false);
        let logs = logs.with_writer(move || written.clone()).with_filter_reloading();
        let handle = logs.reload_handle();
        let reload: Reload = Box::new(move |filter| handle.reload(filter));
        let control = LogControl { setting: LogLevel::Error, reload, last: Mutex::default() };
        let take = || lines.take();
        let logged = || {
            tracing::debug!("a detail");
            tracing::info!("an action");
            tracing::error!("a failure");
            ["a detail", "an action", "a failure"]
                .map(|phrase| lock(&lines.0).windows(phrase.len()).any(|at| at == phrase.as_bytes()))
        };
        tracing::subscriber::with_default(logs.finish(), || {
            for (value, detail, action) in [
                (None, false, false),
                (Some("debug"), true, true),
                (Some(" info\n"), false, true),
                (Some("Debug"), false, false),
                (Some("debug"), true, true),
                (None, false, false),
            ] {
                take();
                control.apply(value);
                let reported = take().contains("invalid log level");
                assert_eq!(reported, value == Some("Debug"), "{value:?}");
                assert_eq!(logged(), [detail, action, true], "{value:?}");
                take();
                control.apply(value);
                assert_eq!(take(), "", "{value:?} is reported once");
            }
            let long = format!("x\n{}", "y".repeat(1 << 20));
            control.apply(Some(&long));
            assert!(take().len() < 500, "a value is shortened");
        });
    }
}
