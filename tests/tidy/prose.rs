// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Extracts the prose of a file: pages, comments, strings, and the messages and added comments of
//! patches.

/// Returns the number and the prose in lower case of each line; `None` for a data file.
pub(crate) fn prose(path: &str, text: impl FnOnce() -> String) -> Option<Vec<(usize, String)>> {
    if path.contains("golden/") || path.contains("LICENSE") {
        return None;
    }
    let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    let extract: fn(&str) -> String = match ending {
        Some("md" | "txt") => |line| outside_quotes(line, '`'),
        Some("rs" | "S" | "c" | "h") => |line| comment_and_strings(line, "//"),
        Some("py" | "toml" | "yml" | "config") => |line| comment_and_strings(line, "#"),
        Some("patch") => added_comment,
        None if path.starts_with("scripts/") => |line| comment_and_strings(line, "#"),
        _ => return None,
    };
    let text = text();
    // Every line of a patch's message is prose.
    let message = text.lines().position(|line| line == "---" && ending == Some("patch"));
    let prose = |(number, line): (usize, &str)| match number < message.unwrap_or(0) {
        true => (number + 1, line.to_lowercase()),
        false => (number + 1, extract(line).to_lowercase()),
    };
    Some(text.lines().enumerate().map(prose).collect())
}

/// Returns the parts of a line outside quotation marks.
fn outside_quotes(line: &str, quote: char) -> String {
    line.split(quote).step_by(2).collect::<Vec<_>>().join(" ")
}

/// Returns the comment and the strings of a line.
fn comment_and_strings(line: &str, mark: &str) -> String {
    let comment = line.find(mark).map_or("", |at| &line[at..]);
    let strings = line.split('"').skip(1).step_by(2).collect::<Vec<_>>();
    format!("{comment} {}", strings.join(" "))
}

/// Returns the comment in a line added by a patch.
fn added_comment(line: &str) -> String {
    let Some(line) = line.strip_prefix('+') else { return String::new() };
    let marks = ["/*", "//"].iter().filter_map(|mark| line.find(mark));
    let begin = if line.trim_start().starts_with(['*', '#']) { Some(0) } else { marks.min() };
    begin.map_or("", |at| &line[at..]).to_owned()
}

/// Returns whether a phrase occurs in a text as whole words.
pub(crate) fn contains_phrase(text: &str, phrase: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(phrase).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + phrase.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

#[test]
fn a_phrase_is_found_only_at_word_boundaries() {
    assert!(contains_phrase("nothing is put back here", "put back"));
    assert!(!contains_phrase("hours", "ours"));
}

#[test]
fn prose_is_extracted_according_to_the_file_type() {
    let patch =
        "Subject: A\nThe reason.\n---\n /* context */\n+ * added\n+\tcode(); /* end */\n-/* no */";
    for (path, text, expected) in [
        ("docs/a.md", "One `code` word", "one   word"),
        ("src/a.rs", "let a = \"text\"; // Why", "// why text"),
        ("scripts/a", "echo \"text\" # Why", "# why text"),
        ("a/b.config", "# Why", "# why "),
        ("a/b.patch", patch, "subject: a|the reason.| * added|/* end */"),
    ] {
        let lines = prose(path, || text.to_owned()).expect("a file with prose");
        let lines: Vec<_> = lines.into_iter().map(|(_, line)| line).collect();
        let found: Vec<_> =
            lines.iter().filter(|line| !line.is_empty()).map(|l| l.as_str()).collect();
        assert_eq!(found.join("|"), expected, "{path}");
    }
    assert!(prose("a.svg", String::new).is_none());
}
