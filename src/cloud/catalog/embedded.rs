//! The catalog embedded in the binary: a table that `src/cloud/data/compact.py` generates, a quarter of the size of its source.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::catalog::raw::{CatalogError, Frame, RawCatalog, assemble};

const TABLE: &str = include_str!("../data/ec2-us-east-1.json");

#[derive(Deserialize)]
struct Table {
    #[serde(flatten)]
    frame: Frame,
    shared: BTreeMap<String, Vec<Value>>,
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

/// The catalog of us-east-1 embedded in the binary, with its source and date. Decoded once.
///
/// # Panics
/// Never: the table is a constant, and a test decodes it.
pub fn embedded() -> &'static RawCatalog {
    static CATALOG: OnceLock<RawCatalog> = OnceLock::new();
    CATALOG.get_or_init(|| decode(TABLE).expect("the embedded table is a constant that a test decodes"))
}

/// Reads a table: `columns` name the fields, a column named in `shared` holds an index into that list, and a row may
/// end early.
pub(crate) fn decode(json: &str) -> Result<RawCatalog, CatalogError> {
    let table: Table = serde_json::from_str(json)?;
    let mut entries = Vec::with_capacity(table.rows.len());
    for (row, cells) in table.rows.into_iter().enumerate() {
        if cells.len() > table.columns.len() {
            let problem = format!("has {} cells for {} columns", cells.len(), table.columns.len());
            return Err(CatalogError::Row { row, problem });
        }
        let mut entry = Map::new();
        for (column, cell) in table.columns.iter().zip(cells) {
            let value = match table.shared.get(column) {
                None => cell,
                Some(values) => {
                    cell.as_u64().and_then(|index| values.get(usize::try_from(index).ok()?)).cloned().ok_or_else(
                        || CatalogError::Row { row, problem: format!("{cell} is no index into shared.{column}") },
                    )?
                }
            };
            entry.insert(column.clone(), value);
        }
        entries.push(Value::Object(entry));
    }
    assemble(table.frame, entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_row_is_reported() {
        let table = |rows: &str| {
            format!(
                r#"{{"region": "r", "zones": ["a"], "shared": {{"zones": [["a"]]}}, "columns": ["name", "zones"], "rows": [{rows}]}}"#
            )
        };
        let text = |rows: &str| decode(&table(rows)).unwrap_err().to_string();
        assert_eq!(text(r#"["m1.x", 1]"#), "row 0 of the catalog table: 1 is no index into shared.zones");
        assert_eq!(text(r#"["m1.x", 0, 3]"#), "row 0 of the catalog table: has 3 cells for 2 columns");
        assert_eq!(text(r#"["m1.x", 0]"#), "instance type m1.x of the catalog: missing field `arch`");
    }
}
