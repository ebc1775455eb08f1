// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lines of limited width, for sentences and shell commands.

/// Writes words after a name, in lines of at most `width`; further lines are aligned with the first
/// word.
pub fn wrap(out: &mut String, width: usize, name: &str, words: &str) {
    let indent = " ".repeat(name.len());
    let options = textwrap::Options::new(width)
        .initial_indent(name)
        .subsequent_indent(&indent)
        .break_words(true);
    for line in textwrap::wrap(words, options) {
        push_trimmed(out, &line);
    }
}

pub fn push_trimmed(out: &mut String, line: &str) {
    out.push_str(line.trim_end());
    out.push('\n');
}

const INDENT: &str = "    ";
/// End of a line before the next word.
const CONTINUATION: &str = " \\";

/// Writes a shell command in lines of at most `width`, which backslashes join.
pub fn wrap_command(out: &mut String, width: usize, command: &str) {
    let end = width.saturating_sub(CONTINUATION.len());
    let mut line = INDENT.to_owned();
    for word in shlex::split(command).unwrap_or_else(|| vec![command.to_owned()]) {
        let pieces = quoted_pieces(&word, end.saturating_sub(INDENT.len()));
        let is_first = line == INDENT;
        if !is_first && line.len() + 1 + pieces[0].len() > end {
            push_trimmed(out, &format!("{line}{CONTINUATION}"));
            INDENT.clone_into(&mut line);
        } else if !is_first {
            line.push(' ');
        }
        for (at, piece) in pieces.iter().enumerate() {
            if at > 0 {
                // Without white space around it, a backslash joins the pieces of one word.
                push_trimmed(out, &format!("{line}\\"));
                line.clear();
            }
            line += piece;
        }
    }
    push_trimmed(out, &line);
}

/// Quotes a word for a shell, in one or more pieces of at most `room` characters.
fn quoted_pieces(word: &str, room: usize) -> Vec<String> {
    // Fails only for a word with a NUL, which no command line contains.
    let quote =
        |text: &str| shlex::try_quote(text).map_or_else(|_| text.into(), |q| q.into_owned());
    let mut pieces = Vec::new();
    let mut piece = String::new();
    for c in word.chars() {
        let longer = format!("{piece}{c}");
        if !piece.is_empty() && quote(&longer).len() > room {
            pieces.push(quote(&piece));
            piece = c.to_string();
        } else {
            piece = longer;
        }
    }
    pieces.push(quote(&piece));
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrapped_command_has_the_same_words() {
        let long = "a/very/long/path/".repeat(9);
        let spaces = "it's \"$HOME\" and ".repeat(9);
        for words in [
            vec!["granule", "compare", "before", "after"],
            vec!["granule", "compare", "--metric", "DC CIVAC", long.as_str(), "", &long, "after"],
            vec![long.as_str(), spaces.as_str(), "one", &spaces],
        ] {
            let mut out = String::new();

            wrap_command(&mut out, 72, &shlex::try_join(words.iter().copied()).unwrap());

            assert!(out.lines().all(|line| line.len() <= 72), "{out}");
            // A shell removes a backslash with the end of its line.
            assert_eq!(shlex::split(&out.replace("\\\n", "")).unwrap(), words, "{out}");
        }
    }

    #[test]
    fn a_command_is_wrapped_between_words() {
        let mut out = String::new();

        wrap_command(&mut out, 30, "granule compare --metric 'DC CIVAC' before after");

        let expected = "    granule compare --metric \\\n    'DC CIVAC' before after\n";
        assert_eq!(out, expected);
    }
}
