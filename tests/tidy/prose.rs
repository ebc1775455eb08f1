// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The prose of a file: pages, comments, strings, and the messages and added comments of patches.

/// Returns the prose of each line with its number, in lower case; `None` for a data file.
pub(crate) fn prose(path: &str, text: impl FnOnce() -> String) -> Option<Vec<(usize, String)>> {
    if path.contains("golden/") || path.contains("LICENSE") {
        return None;
    }
    let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    let words: fn(&str) -> String = match ending {
        Some("md" | "txt") => |line| outside(line, '`'),
        Some("rs" | "S" | "c" | "h") => |line| source(line, "//"),
        Some("py" | "toml" | "yml" | "config") => |line| source(line, "#"),
        Some("patch") => added_comment,
        None if path.starts_with("scripts/") => |line| source(line, "#"),
        _ => return None,
    };
    let text = text();
    // The whole message of a patch is prose.
    let message = text.lines().position(|line| line == "---" && ending == Some("patch"));
    let prose = |(number, line): (usize, &str)| match number < message.unwrap_or(0) {
        true => (number + 1, line.to_lowercase()),
        false => (number + 1, words(line).to_lowercase()),
    };
    Some(text.lines().enumerate().map(prose).collect())
}

/// Returns the parts of a line outside quotes.
fn outside(line: &str, quote: char) -> String {
    line.split(quote).step_by(2).collect::<Vec<_>>().join(" ")
}

/// Returns the comment and the strings of a line.
fn source(line: &str, mark: &str) -> String {
    let comment = line.find(mark).map_or("", |at| &line[at..]);
    let strings = line.split('"').skip(1).step_by(2).collect::<Vec<_>>();
    format!("{comment} {}", strings.join(" "))
}

/// Returns the comment of a line that a patch adds.
fn added_comment(line: &str) -> String {
    let Some(line) = line.strip_prefix('+') else { return String::new() };
    let marks = ["/*", "//"].iter().filter_map(|mark| line.find(mark));
    let begin = if line.trim_start().starts_with(['*', '#']) { Some(0) } else { marks.min() };
    begin.map_or("", |at| &line[at..]).to_owned()
}

/// Returns whether a phrase occurs in a text as whole words.
pub(crate) fn has(text: &str, phrase: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(phrase).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + phrase.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

#[test]
fn a_phrase_is_found_as_whole_words() {
    assert!(has("nothing is put back here", "put back"));
    assert!(!has("hours", "ours"));
}

#[test]
fn prose_is_read_by_the_syntax_of_the_file() {
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
