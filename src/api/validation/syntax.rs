//! Syntax of qualified names, label values and quantities in Kubernetes.

pub use stowage_model::labels::is_label_value;

/// True for a qualified name: an optional DNS subdomain and a slash, then at most 63 letters, digits, `-`, `_` and `.` with a
/// letter or digit at both ends.
pub fn is_qualified_name(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && !name.is_empty() && is_label_value(name),
        None => !text.is_empty() && is_label_value(text),
    }
}

fn is_subdomain(text: &str) -> bool {
    text.len() <= 253
        && text.split('.').all(|part| {
            let bytes = part.as_bytes();
            let edge = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
            edge(bytes.first())
                && edge(bytes.last())
                && bytes.iter().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-')
        })
}

/// True for a Kubernetes quantity, such as `100`, `1500m`, `1.5Gi` or `2e3`.
pub fn is_quantity(text: &str) -> bool {
    let unsigned = |text: &str| -> usize {
        let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
        let whole = digits(text);
        let fraction = text[whole..].strip_prefix('.').map(digits);
        match (whole, fraction) {
            (0, None | Some(0)) => 0,
            (whole, None) => whole,
            (whole, Some(fraction)) => whole + 1 + fraction,
        }
    };
    let text = text.strip_prefix(['+', '-']).unwrap_or(text);
    let number = unsigned(text);
    if number == 0 {
        return false;
    }
    let suffix = &text[number..];
    let exponent = || {
        suffix.strip_prefix(['e', 'E']).is_some_and(|rest| {
            let rest = rest.strip_prefix(['+', '-']).unwrap_or(rest);
            !rest.is_empty() && unsigned(rest) == rest.len()
        })
    };
    ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].contains(&suffix)
        || exponent()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qualified_names_label_values_and_quantities_are_recognized() {
        let long = "x".repeat(64);
        let long_prefix = format!("{}/a", "x".repeat(254));
        for name in ["a", "A-b_c.d", "example.com/a", "a-1.b/x_y"] {
            assert!(is_qualified_name(name), "{name}");
        }
        for name in ["", "/", "a/", "/a", "a/b/c", "Example.com/a", "-a", "a-", "a b", "a..b/c", &long, &long_prefix] {
            assert!(!is_qualified_name(name), "{name}");
        }
        for value in ["", "a", "1.2-3_4"] {
            assert!(is_label_value(value), "{value}");
        }
        for value in ["-1", "a b", "a/b", "é", &long] {
            assert!(!is_label_value(value), "{value}");
        }
        for amount in ["0", "100", "1500m", "1.5Gi", ".5", "5.", "-1", "+1k", "2e3", "2E-3", "1E"] {
            assert!(is_quantity(amount), "{amount}");
        }
        for amount in ["", "lots", "1K", "1 Gi", ".", "--1", "1.2.3", "e3", "1ee3"] {
            assert!(!is_quantity(amount), "{amount}");
        }
    }
}
