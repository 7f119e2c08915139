//! Multipart MIME for cloud-init: parsing and formatting by RFC 2046.

use std::fmt::Write as _;

/// Why a text is not multipart MIME.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MimeError {
    /// A header line without a name.
    #[error("invalid header line {0:?}: write NAME: VALUE, and an empty line before the body")]
    Header(String),
    /// No `Content-Type: multipart/…`.
    #[error("its Content-Type is {0:?}, not multipart/mixed")]
    NotMultipart(String),
    /// No boundary between the parts.
    #[error("its Content-Type names no boundary")]
    NoBoundary,
    /// Nothing between the boundaries.
    #[error("it has no part: no line is --{0}")]
    NoPart(String),
    /// The text ends within a part.
    #[error("its last part does not end: no line after it is --{0}--")]
    Unterminated(String),
}

/// One part: headers and body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Header lines in order and unchanged; a folded header is one entry.
    headers: Vec<String>,
    body: String,
}

impl Part {
    /// A part of one type.
    pub(crate) fn new(content_type: &str, body: &str) -> Self {
        Self { headers: vec![format!("Content-Type: {content_type}")], body: body.replace('\r', "") }
    }

    /// A part that cloud-init runs.
    pub(crate) fn script(body: &str) -> Self {
        let charset = if body.is_ascii() { "us-ascii" } else { "utf-8" };
        Self::new(&format!("text/x-shellscript; charset=\"{charset}\""), body)
    }

    /// Removes all other headers.
    pub(crate) fn keep_headers(&mut self, names: &[&str]) {
        self.headers.retain(|header| names.iter().any(|name| value_of(header, name).is_some()));
    }
}

/// Whether a text starts as MIME.
pub(crate) fn is_mime(text: &str) -> bool {
    let text = text.trim_start();
    text.starts_with("MIME-Version:") || text.starts_with("Content-Type:")
}

/// The parts of a text. Carriage returns are removed. Nothing is decoded: a part keeps its transfer encoding and its header.
pub(crate) fn parts(text: &str) -> Result<Vec<Part>, MimeError> {
    let text = text.replace('\r', "");
    let Part { headers, body } = part(text.trim_start())?;
    let content_type = headers.iter().find_map(|header| value_of(header, "Content-Type")).unwrap_or_default();
    if !content_type.to_ascii_lowercase().starts_with("multipart/") {
        return Err(MimeError::NotMultipart(content_type.to_owned()));
    }
    let boundary = parameter(content_type, "boundary").filter(|name| !name.is_empty()).ok_or(MimeError::NoBoundary)?;
    let (next, last) = (format!("--{boundary}"), format!("--{boundary}--"));
    let mut parts = Vec::new();
    // Text before the first boundary belongs to no part.
    let mut open: Option<String> = None;
    let mut ended = false;
    for line in body.split_inclusive('\n') {
        let bare = line.trim_end();
        if bare == next || bare == last {
            ended = bare == last;
            // The newline before a boundary belongs to the boundary.
            if let Some(mut text) = open.take() {
                text.truncate(text.len() - usize::from(text.ends_with('\n')));
                parts.push(part(&text)?);
            }
            if ended {
                break;
            }
            open = Some(String::new());
        } else if let Some(text) = &mut open {
            text.push_str(line);
        }
    }
    // A boundary that opens an empty part is the end, as for Go's parser and therefore Karpenter.
    if !ended && open.is_some_and(|text| !text.trim().is_empty()) {
        return Err(MimeError::Unterminated(boundary));
    }
    if parts.is_empty() { Err(MimeError::NoPart(boundary)) } else { Ok(parts) }
}

/// Headers up to the first empty line, and the rest.
fn part(text: &str) -> Result<Part, MimeError> {
    let mut headers: Vec<String> = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
        rest = after;
        if line.is_empty() {
            break;
        }
        match headers.last_mut() {
            Some(header) if line.starts_with([' ', '\t']) => {
                header.push('\n');
                header.push_str(line);
            }
            _ if is_header(line) => headers.push(line.to_owned()),
            _ => return Err(MimeError::Header(line.chars().take(60).collect())),
        }
    }
    Ok(Part { headers, body: rest.to_owned() })
}

fn is_header(line: &str) -> bool {
    line.split_once(':').is_some_and(|(name, _)| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic()))
}

/// The value of a header line with that name.
fn value_of<'a>(header: &'a str, name: &str) -> Option<&'a str> {
    let (found, value) = header.split_once(':')?;
    found.eq_ignore_ascii_case(name).then(|| value.trim())
}

/// A parameter of a header's value, such as `boundary` in `multipart/mixed; boundary="a"`.
fn parameter(value: &str, name: &str) -> Option<String> {
    let (_, mut rest) = value.split_once(';')?;
    loop {
        let (found, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let (text, after) = match after.strip_prefix('"') {
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
            Some(quoted) => unquoted(quoted)?,
        };
        if found.trim().eq_ignore_ascii_case(name) {
            return Some(text);
        }
        rest = after.split_once(';')?.1;
    }
}

/// The text up to the closing quote with backslashes removed, and the rest.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut out = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((out, &text[at + 1..])),
            '\\' => out.push(chars.next()?.1),
            c => out.push(c),
        }
    }
    None
}

/// Formats the parts as multipart MIME.
pub(crate) fn write(parts: &[Part]) -> String {
    let boundary = boundary(parts);
    let mut out = format!("MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"{boundary}\"\n");
    for Part { headers, body } in parts {
        // Writing to a string can't fail.
        let _ = write!(out, "\n--{boundary}\n");
        for header in headers {
            let _ = writeln!(out, "{header}");
        }
        let _ = write!(out, "\n{body}");
    }
    let _ = writeln!(out, "\n--{boundary}--");
    out
}

/// `//`, or another boundary where a line of a part starts with it.
fn boundary(parts: &[Part]) -> String {
    let taken = |boundary: &str| {
        let mut lines = parts.iter().flat_map(|part| part.body.lines());
        lines.any(|line| line.strip_prefix("--").is_some_and(|rest| rest.starts_with(boundary)))
    };
    let others = (1..).map(|number: u64| format!("//{number}"));
    let mut candidates = std::iter::once("//".to_owned()).chain(others);
    candidates.find(|candidate| !taken(candidate)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<(Vec<String>, String)> {
        parts(text).unwrap().into_iter().map(|part| (part.headers, part.body)).collect()
    }

    #[test]
    fn parts_are_parsed_with_their_headers_and_bodies() {
        let text = "  \nMIME-Version: 1.0\r\ncontent-type: multipart/mixed;\r\n charset=\"a;b\"; Boundary=\"x \\\"y\"\r\n\r\nbefore\r\n\
                    --x \"y\r\nContent-Type: text/plain;\r\n\tcharset=utf-8\r\nX-Mine: 1\r\n\r\none\r\n\r\n--x \"y  \r\n\r\n--x\r\ntwo\r\n\
                    --x \"y--\r\nafter\r\n--x \"y\r\n";
        assert_eq!(
            read(text),
            [
                (
                    vec!["Content-Type: text/plain;\n\tcharset=utf-8".to_owned(), "X-Mine: 1".to_owned()],
                    "one\n".to_owned()
                ),
                (vec![], "--x\ntwo".to_owned()),
            ]
        );
    }

    #[test]
    fn a_boundary_needs_no_quotes_and_an_opened_empty_part_ends() {
        let text = "Content-Type: multipart/mixed; boundary=b; x=y\n\n--b\nA: 1\n\n#!/bin/sh\n--b\n";
        assert_eq!(read(text), [(vec!["A: 1".to_owned()], "#!/bin/sh".to_owned())]);
    }

    #[test]
    fn errors_name_the_problem() {
        for (text, expected) in [
            ("MIME-Version: 1.0\nCONTENT_TYPE = x\n\n--//\n", MimeError::Header("CONTENT_TYPE = x".into())),
            ("MIME-Version: 1.0\n\n--//\n", MimeError::NotMultipart(String::new())),
            ("Content-Type: text/plain\n\nhello", MimeError::NotMultipart("text/plain".into())),
            ("Content-Type: multipart/mixed\n\n--//\n", MimeError::NoBoundary),
            ("Content-Type: multipart/mixed; boundary=\"\"\n\n--\n", MimeError::NoBoundary),
            ("Content-Type: multipart/mixed; boundary=\"b\n\n--b\n", MimeError::NoBoundary),
            ("Content-Type: multipart/mixed; boundary=b\n\nhello", MimeError::NoPart("b".into())),
            ("Content-Type: multipart/mixed; boundary=b\n\n--b--\n", MimeError::NoPart("b".into())),
            ("Content-Type: multipart/mixed; boundary=b\n\n--b\nA: 1\n\nhello", MimeError::Unterminated("b".into())),
            ("Content-Type: multipart/mixed; boundary=b\n\n--b\nhello\n--b--", MimeError::Header("hello".into())),
        ] {
            assert_eq!(parts(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn a_line_that_looks_like_the_boundary_changes_the_boundary() {
        let parts = [Part::script("--// a comment\n--//1\n"), Part::new("text/plain", "x\r\n")];
        let text = write(&parts);
        assert!(text.contains("boundary=\"//2\""), "{text}");
        assert_eq!(super::parts(&text).unwrap(), [parts[0].clone(), Part::new("text/plain", "x\n")]);
    }
}
