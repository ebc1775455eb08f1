// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bar charts: a lane for each subject, with a bar for each kernel.

use super::svg::{Anchor, Svg, WIDTH, figure};

const LEFT: f64 = 8.0;
const ROOM: f64 = WIDTH - 2.0 * LEFT;

/// Lane of a bar chart.
#[derive(Debug, Clone)]
pub struct Lane {
    /// Name above the lane.
    pub name: String,
    /// Length of each bar, and the text above it.
    pub bars: Vec<(f64, String)>,
}

/// Returns a chart with all bars to one scale; `None` if no bar has a length.
pub fn bars(title: &str, words: &str, lanes: &[Lane]) -> Option<String> {
    let bars = lanes.iter().flat_map(|lane| &lane.bars);
    let greatest = bars.map(|(value, _)| *value).fold(0.0, f64::max);
    if greatest <= 0.0 {
        return None;
    }
    let mut svg = Svg::default();
    for lane in lanes {
        svg.text(LEFT, svg.height + 12.0, Anchor::Start, "", &lane.name);
        svg.height += 16.0;
        for (at, (value, label)) in lane.bars.iter().enumerate() {
            // The first bar is before, the last one after; others have colours of their own.
            let class = match at {
                at if at + 1 == lane.bars.len() => "after".to_owned(),
                0 => "before".to_owned(),
                at => format!("p{}", at % 8),
            };
            svg.text(LEFT, svg.height + 11.0, Anchor::Start, "soft", label);
            let width = (value / greatest * ROOM).max(0.5);
            svg.rect([LEFT, svg.height + 16.0, width, 6.0], &class, Some(label));
            svg.height += 25.0;
        }
        svg.height += 8.0;
    }
    Some(figure(title, words, svg))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_is_a_mark_with_its_label() {
        let lane = |name: &str, values: &[f64]| Lane {
            name: name.to_owned(),
            bars: values.iter().map(|v| (*v, format!("label {v}"))).collect(),
        };
        let chart = bars("title", "ms", &[lane("a", &[4.0, 2.0, 1.0]), lane("b", &[0.0])]).unwrap();

        assert!(chart.contains("data-marks=\"4\"") && chart.contains("label 2"));
        assert!(chart.contains("width=\"344.0\"") && chart.contains("width=\"86.0\""));
        assert_eq!(bars("title", "", &[lane("a", &[0.0])]), None);
        assert_eq!(bars("title", "", &[]), None);
    }
}
