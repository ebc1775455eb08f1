// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SVG drawings, and scales of axes. A drawing has the width of a phone, so that its text is not
//! scaled; its height depends on its content.

use std::fmt::Write;

use super::page::escape_html;

/// Width of every drawing in SVG user units, about pixels.
pub const WIDTH: f64 = 360.0;
/// Number of characters that fit into a line.
const MAX_TEXT_CHARS: usize = 56;

#[derive(Debug, Default)]
pub struct Svg {
    body: String,
    pub height: f64,
    marks: usize,
}

impl Svg {
    fn push_element(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    /// Adds text with its baseline at `y`; `anchor` is the part at `x`: `start`, `middle` or
    /// `end`. Text that does not fit is shortened and has a tooltip.
    pub fn text(&mut self, x: f64, y: f64, anchor: &str, class: &str, text: &str) {
        let shown = shorten_middle(text);
        let title = if shown == text { String::new() } else { tooltip(text) };
        let shown = escape_html(&shown) + &title;
        self.push_element(&format!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{shown}</text>"#
        ));
    }

    pub fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], class: &str) {
        self.push_element(&format!(
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="{class}"/>"#
        ));
    }

    pub fn polyline(&mut self, points: &[(f64, f64)], class: &str) {
        let mut list = String::new();
        for (x, y) in points {
            // Writing into a String cannot fail.
            let _ = write!(list, "{x:.1},{y:.1} ");
        }
        self.push_element(&format!(r#"<polyline points="{}" class="{class}"/>"#, list.trim_end()));
    }

    /// Adds the mark of a figure, with a tooltip.
    pub fn circle(&mut self, x: f64, y: f64, radius: f64, class: &str, title: &str) {
        self.marks += 1;
        let title = tooltip(title);
        self.push_element(&format!(
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" class="mark {class}">{title}</circle>"#
        ));
    }

    /// Adds a rectangle. With a tooltip, it is the mark of a figure.
    pub fn rect(&mut self, [x, y, width, height]: [f64; 4], class: &str, title: Option<&str>) {
        let (mark, title) = match title {
            Some(title) => {
                self.marks += 1;
                ("mark ", tooltip(title))
            }
            None => ("", String::new()),
        };
        let place = format!(r#"x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}""#);
        self.push_element(&format!(r#"<rect {place} class="{mark}{class}">{title}</rect>"#));
    }
}

fn tooltip(text: &str) -> String {
    format!("<title>{}</title>", escape_html(text))
}

/// Removes the middle of text that does not fit into a line: names of configurations differ at
/// their ends.
fn shorten_middle(text: &str) -> String {
    let length = text.chars().count();
    if length <= MAX_TEXT_CHARS {
        return text.to_owned();
    }
    let head = text.chars().take(MAX_TEXT_CHARS / 2 - 1);
    let tail = text.chars().skip(length - MAX_TEXT_CHARS / 2);
    head.chain(['…']).chain(tail).collect()
}

/// Returns a drawing with its caption, which also is its label for screen readers.
pub fn figure_element(title: &str, words: &str, drawing: Svg) -> String {
    let Svg { body, height, marks } = drawing;
    let title = escape_html(title);
    let words =
        if words.is_empty() { String::new() } else { format!("<br>{}", escape_html(words)) };
    format!(
        "<figure><figcaption><b>{title}</b>{words}</figcaption>\n\
         <svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{title}\" \
         data-marks=\"{marks}\">\n{body}</svg>\n</figure>\n"
    )
}

/// Ratio of the largest to the smallest figure above which an axis is logarithmic.
const LOGARITHMIC_RATIO: f64 = 30.0;

/// Scale of an axis: linear from zero, or logarithmic for figures of different magnitude.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    Linear(f64),
    Log(f64, f64),
}

impl Scale {
    pub fn new(figures: impl IntoIterator<Item = f64>) -> Self {
        let (mut least, mut greatest) = (f64::INFINITY, 0.0_f64);
        for figure in figures.into_iter().filter(|figure| *figure > 0.0) {
            least = least.min(figure);
            greatest = greatest.max(figure);
        }
        if greatest == 0.0 {
            Self::Linear(1.0)
        } else if greatest > least * LOGARITHMIC_RATIO {
            Self::Log(least / 1.25, greatest * 1.25)
        } else {
            Self::Linear(greatest * 1.08)
        }
    }

    pub fn from_zero(figures: impl IntoIterator<Item = f64>) -> Self {
        let greatest = figures.into_iter().fold(0.0_f64, f64::max);
        Self::Linear(if greatest > 0.0 { greatest * 1.08 } else { 1.0 })
    }

    /// Returns the position of a figure, from 0 to 1.
    pub fn position(self, figure: f64) -> f64 {
        match self {
            Self::Linear(greatest) => (figure / greatest).clamp(0.0, 1.0),
            Self::Log(least, _) if figure <= least => 0.0,
            Self::Log(least, greatest) => {
                ((figure / least).ln() / (greatest / least).ln()).clamp(0.0, 1.0)
            }
        }
    }

    /// Returns round figures for labels, at most five.
    pub fn ticks(self) -> Vec<f64> {
        match self {
            Self::Linear(greatest) => {
                let raw = greatest / 4.0;
                let power = 10_f64.powf(raw.log10().floor());
                let step = [1.0, 2.0, 2.5, 5.0, 10.0]
                    .into_iter()
                    .map(|step| step * power)
                    .find(|step| *step >= raw);
                let step = step.unwrap_or(raw);
                (0..5).map(|at| f64::from(at) * step).filter(|tick| *tick <= greatest).collect()
            }
            Self::Log(least, greatest) => {
                let (low, high) = (least.log10(), greatest.log10());
                #[expect(clippy::cast_possible_truncation, reason = "a decade of a finite figure")]
                let (first, last) = (low.ceil() as i32, high.floor() as i32);
                let skip = ((last - first) / 4 + 1).max(1);
                let mut ticks: Vec<f64> = (first..=last)
                    .filter(|decade| (decade - first) % skip == 0)
                    .map(|decade| 10_f64.powi(decade))
                    .collect();
                if ticks.len() < 2 {
                    ticks = vec![least * 1.25, greatest / 1.25];
                }
                ticks
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_names_keep_their_different_ends() {
        let name = |last: &str| {
            format!("anonymous_hugetlb_2mb, 64M, 16 vCPUs, dirty-log=manual, round-mode={last}")
        };
        let [one, two] = ["plain", "split"].map(|last| shorten_middle(&name(last)));

        assert_ne!(one, two);
        assert!(one.starts_with("anonymous") && one.ends_with("round-mode=plain"));
        assert_eq!(one.chars().count(), MAX_TEXT_CHARS);
        assert_eq!(shorten_middle(&"é".repeat(MAX_TEXT_CHARS)), "é".repeat(MAX_TEXT_CHARS));
    }

    #[test]
    fn near_figures_have_a_linear_axis_from_zero() {
        let scale = Scale::new([40.0, 100.0]);
        assert_eq!(scale.ticks(), [0.0, 50.0, 100.0]);
        assert!((scale.position(54.0) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn figures_far_apart_have_a_logarithmic_axis() {
        let scale = Scale::new([3.0, 0.0, 4000.0]);
        assert_eq!(scale.ticks(), [10.0, 100.0, 1000.0]);
        assert_eq!(scale.position(0.0), 0.0);
        assert!(scale.position(4000.0) < 1.0 && scale.position(3.0) > 0.0);
    }

    #[test]
    fn an_axis_has_two_to_five_ticks() {
        for exponent in -3..15 {
            for factor in [1.0, 1.7, 3.3, 7.9, 9.99] {
                let greatest = factor * 10_f64.powi(exponent);
                for scale in [
                    Scale::new([greatest]),
                    Scale::new([greatest, greatest * 1e7]),
                    Scale::new([greatest, greatest * 35.0]),
                ] {
                    let ticks = scale.ticks();
                    assert!((2..=5).contains(&ticks.len()), "{scale:?}: {ticks:?}");
                    assert!(ticks.iter().all(|tick| (0.0..=1.0).contains(&scale.position(*tick))));
                }
            }
        }
        assert_eq!(Scale::new([]), Scale::Linear(1.0));
    }
}
