// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What every page has: its head, its looks, and where text becomes HTML. A comparison's page, one
//! kernel's and the lab's are all made of it.

use std::fmt::Write;

const STYLE: &str = include_str!("html/style.css");

/// What is escaped in HTML and SVG.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A page with a title above its body, which is HTML.
pub fn page(title: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{0}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{0}</h1>\n\
         {body}</main>\n</body>\n</html>\n",
        escaped(title)
    )
}

/// A sentence that says how it came out; `class` is a verdict's name, or empty where all is well.
pub fn verdict(class: &str, words: &str) -> String {
    format!("<p class=\"verdict {class}\">{}</p>\n", escaped(words))
}

/// A table of cells that are HTML.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut out = String::from("<div class=\"scroll\"><table><thead><tr>");
    for name in head {
        // Writing into a String cannot fail.
        let _ = write!(out, "<th>{}</th>", escaped(name));
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in rows {
        let _ = writeln!(out, "<tr><td>{}</td></tr>", row.join("</td><td>"));
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// Facts by name, a column for each of what they are of. What is the same everywhere stands once.
pub fn facts(columns: &[&str], rows: &[(&str, Vec<Option<String>>)]) -> String {
    let mut out = String::from("<div class=\"scroll\"><table class=\"facts\"><thead><tr><th></th>");
    for name in columns {
        let _ = write!(out, "<th>{}</th>", escaped(name));
    }
    out.push_str("</tr></thead><tbody>\n");
    for (name, cells) in rows {
        let cells: Vec<String> = cells
            .iter()
            .map(
                |fact| match fact.as_deref().filter(|fact| !fact.is_empty()) {
                    Some(fact) => escaped(fact),
                    None => "<span class=\"soft\">not known</span>".to_owned(),
                },
            )
            .collect();
        let _ = write!(out, "<tr><th>{name}</th>");
        let _ = match cells.as_slice() {
            [first, rest @ ..] if !rest.is_empty() && rest.iter().all(|cell| cell == first) => {
                write!(out, "<td colspan=\"{}\">{first}</td>", cells.len())
            }
            cells => write!(out, "<td>{}</td>", cells.join("</td><td>")),
        };
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// What folds away.
pub fn details(summary: &str, text: &str) -> String {
    format!(
        "<details><summary>{}</summary>\n<pre>{}</pre></details>\n",
        escaped(summary),
        escaped(text)
    )
}

/// The command that made the page.
pub fn made_by(command: &str) -> String {
    format!("<p>Made by</p>\n<pre>{}</pre>\n", escaped(command))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_as_text_is_never_html() {
        let page = page("<a>", "");
        let parts = [
            page,
            verdict("", "<a>"),
            details("<a>", "<a>"),
            made_by("<a>"),
            facts(&["<a>"], &[("name", vec![Some("<a>".to_owned())])]),
            table(&["<a>"], &[]),
        ];
        for part in parts {
            assert!(
                part.contains("&lt;a&gt;") && !part.contains("<a>"),
                "{part}"
            );
        }
    }

    #[test]
    fn a_fact_that_is_the_same_everywhere_stands_once() {
        let same = vec![Some("x".to_owned()), Some("x".to_owned())];
        let other = vec![Some("x".to_owned()), None];
        let text = facts(&["one", "two"], &[("same", same), ("other", other)]);
        assert!(
            text.contains("<th>same</th><td colspan=\"2\">x</td>"),
            "{text}"
        );
        assert!(
            text.contains("<td>x</td><td><span class=\"soft\">not known</span></td>"),
            "{text}"
        );
    }

    #[test]
    fn a_table_has_a_cell_for_each_figure() {
        let text = table(&["a", "b"], &[vec!["1".to_owned(), "<b>2</b>".to_owned()]]);
        assert!(text.contains("<th>a</th><th>b</th>"));
        assert!(text.contains("<tr><td>1</td><td><b>2</b></td></tr>"));
    }
}
