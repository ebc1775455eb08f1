// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The prose of a file: pages, comments, strings, and the messages and added comments of patches.

/// Syntax of a file's prose.
#[derive(Debug, Clone, Copy)]
enum Syntax {
    /// Every line, except code in backquotes.
    Page,
    /// Comments after this mark, and strings.
    Source(&'static str),
    /// The message, and comments in added lines.
    Patch,
}

/// Returns the syntax of a file; `None` if it is data.
fn syntax(path: &str) -> Option<Syntax> {
    let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
    if path.contains("golden/") || path.contains("LICENSE") {
        return None;
    }
    match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("md" | "txt") => Some(Syntax::Page),
        Some("rs" | "S" | "c" | "h") => Some(Syntax::Source("//")),
        Some("py" | "toml" | "yml" | "config") => Some(Syntax::Source("#")),
        Some("patch") => Some(Syntax::Patch),
        None if path.starts_with("scripts/") => Some(Syntax::Source("#")),
        _ => None,
    }
}

/// Returns the lines of a file that have prose, in lower case, by number; `None` if it is data.
pub(crate) fn prose(path: &str, text: impl FnOnce() -> String) -> Option<Vec<(usize, String)>> {
    let syntax = syntax(path)?;
    let text = text();
    let message = text.lines().position(|line| line == "---").unwrap_or(0);
    let prose = |(number, line): (usize, &str)| {
        let words = match syntax {
            Syntax::Page => outside(line, '`'),
            Syntax::Source(mark) => source(line, mark),
            Syntax::Patch if number < message => line.to_owned(),
            Syntax::Patch => added_comment(line),
        };
        (number + 1, words.to_lowercase())
    };
    Some(text.lines().enumerate().map(prose).collect())
}

/// Returns the parts of a line outside of pairs of a quote.
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
