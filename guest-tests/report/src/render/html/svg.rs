// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A drawing of fixed width, its lines growing downwards. It is shown no wider than a phone is, so
//! its text keeps its size.

use std::fmt::Write;

pub use super::super::page::escaped;

/// The width of every drawing in its own units, which are about pixels.
pub const WIDTH: f64 = 360.0;
/// How many characters of a line of text fit.
const LINE: usize = 56;

/// Where text is held.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// A drawing.
#[derive(Debug, Default)]
pub struct Svg {
    body: String,
    /// How far down it reaches.
    pub height: f64,
    /// How many marks stand for data.
    marks: usize,
}

impl Svg {
    fn put(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    /// Text with its base line at `y`; what does not fit into a line is left to its tooltip.
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
        self.put(&format!(
            r#"<polyline points="{}" class="{class}"/>"#,
            list.trim_end()
        ));
    }

    /// A mark that stands for a figure, which its tooltip tells.
    pub fn circle(&mut self, x: f64, y: f64, radius: f64, class: &str, title: &str) {
        self.marks += 1;
        self.put(&format!(
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" class="mark {class}"><title>{}</title></circle>"#,
            escaped(title)
        ));
    }

    /// A piece of a bar, which stands for a figure if it has a title.
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

    /// The drawing with its name, which is read aloud.
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

/// What fits into a line: a longer text loses its middle, because names of configurations begin
/// with what they share and differ in the options at their ends.
fn shortened(text: &str) -> String {
    let length = text.chars().count();
    if length <= LINE {
        return text.to_owned();
    }
    let head = text.chars().take(LINE / 2 - 1);
    let tail = text.chars().skip(length - LINE / 2);
    head.chain(['…']).chain(tail).collect()
}

/// A figure with its caption.
pub fn figure(title: &str, words: &str, drawing: Svg) -> String {
    format!(
        "<figure><figcaption><b>{}</b>{}</figcaption>\n{}\n</figure>\n",
        escaped(title),
        if words.is_empty() {
            String::new()
        } else {
            format!("<br>{}", escaped(words))
        },
        drawing.finish(title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_that_differ_at_their_end_still_differ_when_shortened() {
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
