//! Renders preflight findings as a table and as JSON.

use std::io::Write;

use serde::Serialize;
use stowage_cloud::ec2::preflight::{CheckResult, Finding};

/// Maximum width of details and fixes in characters; longer text wraps.
const WIDEST: usize = 56;

#[derive(Serialize)]
struct Report<'f> {
    region: &'f str,
    cluster: &'f str,
    ok: usize,
    warnings: usize,
    failed: usize,
    checks: &'f [Finding],
}

fn count(findings: &[Finding], grade: CheckResult) -> usize {
    findings.iter().filter(|finding| finding.result == grade).count()
}

/// Writes the findings as JSON; the contract of `stowage preflight --output json`.
///
/// # Errors
/// `out` cannot be written to.
pub fn json(findings: &[Finding], region: &str, cluster: &str, out: &mut dyn Write) -> std::io::Result<()> {
    let report = Report {
        region,
        cluster,
        ok: count(findings, CheckResult::Ok),
        warnings: count(findings, CheckResult::Warning),
        failed: count(findings, CheckResult::Failed),
        checks: findings,
    };
    serde_json::to_writer_pretty(&mut *out, &report)?;
    writeln!(out)
}

/// Writes the findings as a table.
///
/// # Errors
/// `out` cannot be written to.
pub fn table(findings: &[Finding], out: &mut dyn Write) -> std::io::Result<()> {
    let rows: Vec<[Vec<String>; 4]> = findings
        .iter()
        .map(|finding| {
            let checked = vec![finding.check.clone()];
            [checked, vec![finding.result.as_str().to_owned()], lines(&finding.detail), lines(&finding.fix)]
        })
        .collect();
    let headings = ["CHECK", "RESULT", "DETAIL", "FIX"];
    let width = |column: usize| {
        let cells = rows.iter().flat_map(|row| &row[column]).map(|line| line.chars().count());
        cells.max().unwrap_or(0).max(headings[column].len())
    };
    let widths = [width(0), width(1), width(2)];
    let mut line = |cells: [&str; 4]| {
        let text = format!(
            "{:<check$}  {:<result$}  {:<detail$}  {}",
            cells[0],
            cells[1],
            cells[2],
            cells[3],
            check = widths[0],
            result = widths[1],
            detail = widths[2]
        );
        writeln!(out, "{}", text.trim_end())
    };
    line(headings)?;
    for row in &rows {
        let height = row.iter().map(Vec::len).max().unwrap_or(0);
        for at in 0..height {
            let cell = |column: usize| row[column].get(at).map_or("", String::as_str);
            line([cell(0), cell(1), cell(2), cell(3)])?;
        }
    }
    let [ok, warnings, failed] =
        [CheckResult::Ok, CheckResult::Warning, CheckResult::Failed].map(|grade| count(findings, grade));
    let plural = if warnings == 1 { "" } else { "s" };
    writeln!(out, "\n{ok} ok, {warnings} warning{plural}, {failed} failed")
}

/// Wraps a text into lines of at most [`WIDEST`] characters; a longer word gets a line of its own.
fn lines(text: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match out.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= WIDEST => {
                line.push(' ');
                line.push_str(word);
            }
            _ => out.push(word.to_owned()),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        vec![
            Finding::ok("credentials", "arn:aws:sts::111122223333:assumed-role/stowage/s in us-east-1".to_owned()),
            Finding::warning(
                "on-demand prices",
                "pricing:GetProducts: AccessDeniedException: no; the price list of us-east-1 in the binary is used instead: plans may not be the cheapest".to_owned(),
                "allow pricing:GetProducts; docs/aws has the policy".to_owned(),
            ),
            Finding::failed(
                "default: subnets",
                "subnetSelectorTerms select no subnets".to_owned(),
                "tag the subnets as the terms say, or correct the terms".to_owned(),
            ),
        ]
    }

    #[test]
    fn the_table_shows_status_details_and_fix() {
        let mut out = Vec::new();
        table(&findings(), &mut out).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap());
    }

    #[test]
    fn the_json_has_the_same_findings() {
        let mut out = Vec::new();
        json(&findings(), "us-east-1", "demo", &mut out).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap());
    }

    #[test]
    fn wrapping_loses_no_word() {
        let long = "x".repeat(WIDEST + 10);
        let full = "w".repeat(WIDEST - 2);
        for (text, wrapped) in [
            ("", &[][..]),
            ("one  two three", &["one two three"]),
            (&format!("a {long} b"), &["a", &long, "b"]),
            (&format!("{full} b c"), &[&format!("{full} b"), "c"]),
        ] {
            assert_eq!(lines(text), wrapped, "{text:?}");
        }
    }
}
