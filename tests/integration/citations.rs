//! Citations in the sources resolve: `Karpenter core reference 5.2` and `Karpenter AWS reference 9.4` name a section of
//! `docs/reference/karpenter-core.md` or `karpenter-aws.md`, and a test whose name begins with `b42_` or `c17_` covers a numbered
//! behavior of those pages.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it for tests"))
}

/// Text of a reference page, the numbers of its headings, and the ids of its numbered behaviors.
struct Page {
    sections: BTreeSet<String>,
    ids: BTreeSet<String>,
}

impl Page {
    fn read(name: &str, letter: char) -> Self {
        let text = fs::read_to_string(root().join("docs/reference").join(name)).unwrap();
        let heading = |line: &str| {
            let title = line.strip_prefix('#')?.trim_start_matches('#').trim_start();
            let number = title.split_whitespace().next()?;
            number.starts_with(|c: char| c.is_ascii_digit()).then(|| number.to_owned())
        };
        // Behaviors are the first cells of tables: `| b42 |`, with or without code marks and anchors.
        let id = |line: &str| {
            let cell = line.strip_prefix('|')?.split('|').next()?;
            let word = cell.split_whitespace().last()?;
            let word = word.rsplit('>').next()?.trim_matches('`');
            is_id(word, letter).then(|| word.to_owned())
        };
        Self { sections: text.lines().filter_map(heading).collect(), ids: text.lines().filter_map(id).collect() }
    }
}

fn is_id(word: &str, letter: char) -> bool {
    let digits = word.strip_prefix(letter).unwrap_or_default();
    digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_digit())
}

fn sources() -> Vec<(PathBuf, String)> {
    fn collect(folder: &Path, out: &mut Vec<(PathBuf, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, out);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                out.push((path, text));
            }
        }
    }
    let mut out = Vec::new();
    collect(&root().join("src"), &mut out);
    out
}

/// The text with the marks of line comments removed, as one line: citations may be broken over two lines.
fn without_comment_marks(text: &str) -> String {
    let line = |line: &str| {
        let line = line.trim_start();
        ["//!", "///", "//"].iter().find_map(|mark| line.strip_prefix(mark)).unwrap_or(line).trim().to_owned()
    };
    text.lines().map(line).collect::<Vec<_>>().join(" ")
}

/// Page and section of each citation: `core reference 5.2`, also with the word `section` between.
fn citations(text: &str) -> Vec<(String, String)> {
    let text = without_comment_marks(text);
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut out = Vec::new();
    for at in 1..words.len() {
        if !matches!(words[at].trim_end_matches(','), "reference") {
            continue;
        }
        let mut rest = words[at + 1..].iter().copied().skip_while(|word| *word == "section");
        let number: String =
            rest.next().unwrap_or_default().chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let number = number.trim_end_matches('.');
        if !number.is_empty() {
            out.push((words[at - 1].trim_start_matches('(').to_owned(), number.to_owned()));
        }
    }
    out
}

#[test]
fn every_cited_section_exists() {
    let (core, aws) = (Page::read("karpenter-core.md", 'b'), Page::read("karpenter-aws.md", 'c'));
    let mut wrong = Vec::new();
    let mut found = 0;
    for (path, text) in sources() {
        for (page, section) in citations(&text) {
            found += 1;
            let resolves = match page.as_str() {
                "core" => core.sections.contains(&section),
                "AWS" => aws.sections.contains(&section),
                _ => false,
            };
            if !resolves {
                wrong.push(format!("{}: {page} reference {section}", path.display()));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    assert!(found > 15, "only {found} citations were found");
}

#[test]
fn every_behavior_id_in_a_test_name_exists() {
    let pages = [('b', Page::read("karpenter-core.md", 'b')), ('c', Page::read("karpenter-aws.md", 'c'))];
    let mut wrong = Vec::new();
    let mut found = 0;
    for (path, text) in sources() {
        for name in text.split("fn ").skip(1) {
            for (letter, page) in &pages {
                let Some((id, _)) = name.split_once('_').filter(|(id, _)| is_id(id, *letter)) else { continue };
                found += 1;
                if !page.ids.contains(id) {
                    wrong.push(format!("{}: {id}", path.display()));
                }
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    assert!(found > 100, "only {found} test names carry an id");
}

#[test]
fn citations_are_found_across_line_breaks() {
    let text = "//! One (Karpenter AWS\n//! reference 9.4): two (core reference, section 14).\n/// no reference 7 here";
    let read: Vec<(String, String)> = citations(text);
    let read: Vec<(&str, &str)> = read.iter().map(|(page, section)| (page.as_str(), section.as_str())).collect();
    assert_eq!(read, [("AWS", "9.4"), ("core", "14"), ("no", "7")]);
}
