//! Renders a plan as a self-contained HTML page without scripts.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;

use stowage_planner::{Plan, PlannedNode, Problem};

use crate::cli::output::{Times, filled, gap_percent, next_best, placed, reasons, rows};

/// Maximum number of nodes drawn, most expensive first; bounds the size of the page.
const DRAWN: usize = 1_000;
/// Width of a node in SVG units.
const WIDTH: f64 = 400.0;
/// Hue step between workloads in degrees: the golden angle keeps adjacent hues distinct.
const HUE_STEP: u64 = 137;

const STYLE: &str = "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1b1f24;background:#fff}\
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}\
.tiles{display:flex;flex-wrap:wrap;gap:1rem}.tile{border:1px solid #d5d9de;border-radius:8px;padding:.6rem 1rem}\
.tile b{display:block;font-size:1.3rem}\
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #e6e8eb}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}\
.nodes{display:grid;grid-template-columns:repeat(auto-fill,minmax(22rem,1fr));gap:.8rem}\
.node{border:1px solid #d5d9de;border-radius:8px;padding:.5rem .7rem}.node svg{width:100%;height:34px;display:block}\
.node small{color:#59636e}li{margin:.3rem 0}\
@media(prefers-color-scheme:dark){body{color:#e6e8eb;background:#14171a}.tile,.node{border-color:#3a4149}th,td{border-color:#2a3036}.node small{color:#9aa4af}}";

/// HTML-escaped text.
struct Text<'t>(&'t str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                c => write!(f, "{c}")?,
            }
        }
        Ok(())
    }
}

/// Workload of a pod, guessed from its name: without a trailing ordinal or generated suffix.
fn workload(key: &str) -> &str {
    let name = key.find('/').map_or(0, |slash| slash + 1);
    key[name..].rfind('-').map_or(key, |dash| &key[..name + dash])
}

fn hue(name: &str) -> u64 {
    name.bytes().fold(7_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte))).wrapping_mul(HUE_STEP)
        % 360
}

/// Writes the page.
///
/// # Errors
/// `out` cannot be written to.
pub fn write(problem: &Problem, plan: &Plan, times: Times, out: &mut dyn Write) -> std::io::Result<()> {
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Stowage plan</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head><body>\n<h1>Plan</h1>\n<div class=\"tiles\">"
    )?;
    let mut tile = |value: String, what: &str| write!(out, "<div class=\"tile\"><b>{value}</b>{what}</div>");
    tile(format!("{} of {}", placed(plan), problem.pods.len()), "pods placed")?;
    tile(plan.new_nodes.len().to_string(), "nodes to buy")?;
    tile(format!("{:.4}", plan.cost.usd()), "USD per hour")?;
    if let (Some(bound), Some(gap)) = (plan.lower_bound, gap_percent(plan)) {
        tile(format!("{:.4}", bound.usd()), "lower bound, USD per hour")?;
        tile(format!("{gap:.1} %"), if plan.optimal { "gap, optimal" } else { "gap" })?;
    }
    let times = [(times.solve, "planned in"), (times.prove, "then proof in")];
    for (time, what) in times.into_iter().filter(|(time, _)| !time.is_zero()) {
        tile(format!("{:.1} ms", time.as_secs_f64() * 1e3), what)?;
    }
    writeln!(out, "</div>")?;
    unschedulable(problem, plan, out)?;
    kinds(problem, plan, out)?;
    drawing(problem, plan, out)?;
    writeln!(out, "</body></html>")
}

fn unschedulable(problem: &Problem, plan: &Plan, out: &mut dyn Write) -> std::io::Result<()> {
    if plan.unschedulable.is_empty() {
        return Ok(());
    }
    writeln!(out, "<h2>Unschedulable pods</h2><ul>")?;
    for (reason, pods) in reasons(problem, plan) {
        let others = if pods.len() == 1 { String::new() } else { format!(" and {} more", pods.len() - 1) };
        writeln!(out, "<li><b>{}</b>{others}: {}</li>", Text(pods[0]), Text(reason))?;
    }
    writeln!(out, "</ul>")
}

fn kinds(problem: &Problem, plan: &Plan, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(
        out,
        "<h2>New nodes</h2><table><tr><th class=\"n\">Nodes</th><th>NodePool</th><th>Type</th><th>Zone</th><th>Capacity</th>\
         <th class=\"n\">USD/h each</th><th class=\"n\">Pods</th><th class=\"n\">CPU</th><th class=\"n\">Memory</th><th>Next best</th></tr>"
    )?;
    for ((pool, instance_type, zone, capacity, price), row) in rows(problem, plan) {
        let (cpu, memory) = row.mean_filled();
        writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{capacity}</td><td class=\"n\">{:.4}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{cpu:.0} %</td><td class=\"n\">{memory:.0} %</td><td>{}</td></tr>",
            row.nodes,
            Text(pool),
            Text(instance_type),
            Text(zone),
            price.usd(),
            row.pods,
            Text(&row.next_best())
        )?;
    }
    writeln!(out, "</table>")?;
    if !plan.placements.is_empty() {
        writeln!(out, "<h2>Existing nodes</h2><table><tr><th>Node</th><th class=\"n\">Pods</th></tr>")?;
        for placement in &plan.placements {
            let name = &problem.nodes[placement.node].name;
            writeln!(out, "<tr><td>{}</td><td class=\"n\">{}</td></tr>", Text(name), placement.pods.len())?;
        }
        writeln!(out, "</table>")?;
    }
    Ok(())
}

fn drawing(problem: &Problem, plan: &Plan, out: &mut dyn Write) -> std::io::Result<()> {
    let mut nodes: Vec<&PlannedNode> = plan.new_nodes.iter().collect();
    nodes.sort_by_key(|node| std::cmp::Reverse(node.choices.first().map(|choice| choice.price)));
    write!(
        out,
        "<h2>Nodes</h2><p>Upper bar CPU, lower bar memory, one color per workload; the empty part is not requested."
    )?;
    if nodes.len() > DRAWN {
        write!(out, " The {DRAWN} most expensive of {} nodes are drawn.", nodes.len())?;
    }
    writeln!(out, "</p><div class=\"nodes\">")?;
    for node in nodes.into_iter().take(DRAWN) {
        draw(problem, node, out)?;
    }
    writeln!(out, "</div>")
}

fn draw(problem: &Problem, node: &PlannedNode, out: &mut dyn Write) -> std::io::Result<()> {
    let (Some(choice), Some((cpu, memory))) = (node.choices.first(), filled(node)) else {
        return Ok(());
    };
    let mut parts: BTreeMap<&str, (usize, i64, i64)> = BTreeMap::new();
    for pod in &node.pods {
        let pod = &problem.pods[*pod];
        let part = parts.entry(workload(&pod.key)).or_default();
        part.0 += 1;
        part.1 += pod.class.requests.cpu.0;
        part.2 += pod.class.requests.memory.0;
    }
    let next = next_best(node).map_or_else(
        || "no other type holds its pods".to_owned(),
        |next| format!("next best {} at {:.4}", next.instance_type.name, next.price.usd()),
    );
    write!(
        out,
        "<div class=\"node\"><b>{}</b> {} {} · {:.4} USD/h · {} pods<br><small>CPU {cpu:.0} %, memory {memory:.0} %; {}</small>\
         <svg viewBox=\"0 0 {WIDTH} 34\" preserveAspectRatio=\"none\"><rect width=\"{WIDTH}\" height=\"15\" fill=\"#8883\"/>\
         <rect y=\"19\" width=\"{WIDTH}\" height=\"15\" fill=\"#8883\"/>",
        Text(&choice.instance_type.name),
        Text(&choice.zone),
        choice.capacity_type,
        choice.price.usd(),
        node.pods.len(),
        Text(&next)
    )?;
    let allocatable = &choice.instance_type.allocatable;
    #[allow(clippy::cast_precision_loss)]
    let width = |part: i64, whole: i64| if whole > 0 { part as f64 / whole as f64 * WIDTH } else { 0.0 };
    let (mut at_cpu, mut at_memory) = (0.0, 0.0);
    for (name, (pods, cpu, memory)) in parts {
        let (cpu, memory) = (width(cpu, allocatable.cpu.0), width(memory, allocatable.memory.0));
        write!(
            out,
            "<g fill=\"hsl({} 60% 55%)\"><title>{}: {pods} pods</title><rect x=\"{at_cpu:.1}\" width=\"{cpu:.1}\" height=\"15\"/>\
             <rect x=\"{at_memory:.1}\" y=\"19\" width=\"{memory:.1}\" height=\"15\"/></g>",
            hue(name),
            Text(name)
        )?;
        at_cpu += cpu;
        at_memory += memory;
    }
    writeln!(out, "</svg></div>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_in_the_page() {
        assert_eq!(Text("<b a=\"1\">'&").to_string(), "&lt;b a=&quot;1&quot;&gt;&#39;&amp;");
    }

    #[test]
    fn pods_of_one_workload_have_one_color() {
        assert_eq!(workload("shop/web-7d9f-abcde"), "shop/web-7d9f");
        assert_eq!(workload("team-a/web"), "team-a/web");
        assert_eq!(hue(workload("n/db-0")), hue(workload("n/db-1")));
        assert!(hue("anything") < 360);
    }
}
