//! Scenario files: `{"nodePools", "pods", "nodes", "daemonSets"}` in JSON, read one object at a time, so that the file is never in memory
//! as a whole.

use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::cli::manifests::input_error::InputError;

/// A part of a scenario.
pub enum Part {
    /// An object, with its kind.
    Object(Value),
    /// The name of an unknown section, which is skipped.
    Unknown(String),
}

type Sink<'i> = &'i mut dyn FnMut(Part) -> Result<(), InputError>;

/// Reads a scenario file; `sink` gets each part.
///
/// # Errors
/// The file is unreadable or malformed, or `sink` fails.
pub fn read(file: &Path, sink: Sink<'_>) -> Result<(), InputError> {
    let open = File::open(file).map_err(|error| InputError::Read { file: file.into(), error })?;
    let mut stopped = None;
    let mut reader = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 18, open));
    let sections = Sections { sink, stopped: &mut stopped };
    let read = sections.deserialize(&mut reader).and_then(|()| reader.end());
    match (stopped, read) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err(error)) => Err(InputError::Syntax { file: file.into(), problem: error.to_string() }),
    }
}

/// Reads the scenario section by section.
struct Sections<'i> {
    sink: Sink<'i>,
    stopped: &'i mut Option<InputError>,
}

impl<'de> DeserializeSeed<'de> for Sections<'_> {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Sections<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with nodePools, pods, nodes and daemonSets")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(section) = map.next_key::<String>()? {
            let kind = match section.as_str() {
                "nodePools" => "NodePool",
                "pods" => "Pod",
                "nodes" => "Node",
                "daemonSets" => "DaemonSet",
                "nodeClasses" => "EC2NodeClass",
                "namespaces" => "Namespace",
                "persistentVolumes" => "PersistentVolume",
                "persistentVolumeClaims" => "PersistentVolumeClaim",
                "storageClasses" => "StorageClass",
                "csiNodes" => "CSINode",
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    if let Err(error) = (self.sink)(Part::Unknown(section)) {
                        *self.stopped = Some(error);
                        return Err(serde::de::Error::custom("stopped"));
                    }
                    continue;
                }
            };
            map.next_value_seed(Section { sink: &mut *self.sink, stopped: &mut *self.stopped, kind })?;
        }
        Ok(())
    }
}

/// Reads one list of objects, one object at a time.
struct Section<'i> {
    sink: Sink<'i>,
    stopped: &'i mut Option<InputError>,
    kind: &'static str,
}

impl<'de> DeserializeSeed<'de> for Section<'_> {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Section<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {}s", self.kind)
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(mut object) = seq.next_element::<Value>()? {
            if let Some(fields) = object.as_object_mut() {
                fields.insert("kind".into(), self.kind.into());
            }
            if let Err(error) = (self.sink)(Part::Object(object)) {
                *self.stopped = Some(error);
                return Err(serde::de::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}
