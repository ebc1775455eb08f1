// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A drawing of fixed width that grows downwards. It is shown no wider than a phone, so its text
//! keeps its size.

use std::fmt::Write;

use super::page::escaped;

/// Width of every drawing in its own units, about pixels.
pub const WIDTH: f64 = 360.0;
/// Number of characters that fit into a line.
const LINE: usize = 56;

/// Part of a text at its x coordinate.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// Drawing.
#[derive(Debug, Default)]
pub struct Svg {
    body: String,
    /// Height so far.
    pub height: f64,
    /// Number of marks that stand for data.
    marks: usize,
}

impl Svg {
    fn put(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    /// Adds text with its base line at `y`. A text that does not fit is shortened and has a tooltip.
    pub fn text(&mut self, x: f64, y: f64, anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let shown = shortened(text);
        let mut title = String::new();
        if shown != text {
            title = format!("<title>{}</title>", escaped(text));
        }
        self.put(&format!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{}{title}</text>"#,
            escaped(&shown)
        ));
    }

    pub fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], class: &str) {
        self.put(&format!(
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="{class}"/>"#
        ));
    }

    pub fn path(&mut self, points: &[(f64, f64)], class: &str) {
        let mut list = String::new();
        for (x, y) in points {
            // Writing into a String cannot fail.
            let _ = write!(list, "{x:.1},{y:.1} ");
        }
        self.put(&format!(r#"<polyline points="{}" class="{class}"/>"#, list.trim_end()));
    }

    /// Adds a mark for a figure, with a tooltip.
    pub fn circle(&mut self, x: f64, y: f64, radius: f64, class: &str, title: &str) {
        self.marks += 1;
        self.put(&format!(
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" class="mark {class}"><title>{}</title></circle>"#,
            escaped(title)
        ));
    }

    /// Adds a part of a bar; with a tooltip it is a mark for a figure.
    pub fn rect(&mut self, [x, y, width, height]: [f64; 4], class: &str, title: Option<&str>) {
        let (mark, title) = match title {
            Some(title) => {
                self.marks += 1;
                ("mark ", format!("<title>{}</title>", escaped(title)))
            }
            None => ("", String::new()),
        };
        self.put(&format!(
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" class="{mark}{class}">{title}</rect>"#
        ));
    }

    /// Returns the drawing with its name for screen readers.
    pub fn finish(self, name: &str) -> String {
        format!(
            "<svg viewBox=\"0 0 {WIDTH} {:.0}\" role=\"img\" aria-label=\"{}\" data-marks=\"{}\">\n{}</svg>",
            self.height,
            escaped(name),
            self.marks,
            self.body
        )
    }
}

/// Removes the middle of a text that does not fit into a line: names of configurations begin alike
/// and differ in the options at their ends.
fn shortened(text: &str) -> String {
    let length = text.chars().count();
    if length <= LINE {
        return text.to_owned();
    }
    let head = text.chars().take(LINE / 2 - 1);
    let tail = text.chars().skip(length - LINE / 2);
    head.chain(['…']).chain(tail).collect()
}

/// Returns a drawing with its caption.
pub fn figure(title: &str, words: &str, drawing: Svg) -> String {
    format!(
        "<figure><figcaption><b>{}</b>{}</figcaption>\n{}\n</figure>\n",
        escaped(title),
        if words.is_empty() { String::new() } else { format!("<br>{}", escaped(words)) },
        drawing.finish(title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_names_keep_their_different_ends() {
        let name = |last: &str| {
            format!("anonymous_hugetlb_2mb, 64M, 16 vCPUs, dirty-log=manual, round-mode={last}")
        };
        let [one, two] = ["plain", "split"].map(|last| shortened(&name(last)));

        assert_ne!(one, two);
        assert!(one.starts_with("anonymous") && one.ends_with("round-mode=plain"));
        assert_eq!(one.chars().count(), LINE);
        assert_eq!(shortened(&"é".repeat(LINE)), "é".repeat(LINE));
    }
}
