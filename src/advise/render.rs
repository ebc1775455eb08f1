// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Prints the ranking as tables, the reasons for the top choices, and what was left out.

use granule_types::units::Bytes;

use super::{
    candidates::LeftOut,
    rank::{Estimate, LoggedWrites, Ranking, Row},
};

/// Nanoseconds of a millisecond and of a microsecond.
const MS: f64 = 1e6;
const US: f64 = 1e3;

/// Returns the table of ranked configurations.
pub fn ranking_table(ranking: &Ranking) -> String {
    let header = [
        "",
        "backing",
        "prefault",
        "dirty log",
        "pages",
        "tables",
        "populate",
        "first touch",
        "logged write",
        "total",
    ];
    let units = ["", "", "", "", "", "per GiB", "ms/GiB", "ms/GiB", "us", "ms/GiB"];
    let rows = ranking.rows.iter().enumerate().map(|(index, row)| {
        let populate = if row.prefault { figure(row.populate, MS) } else { "-".to_owned() };
        [
            (index + 1).to_string(),
            row.backing.to_string(),
            if row.prefault { "on" } else { "off" }.to_owned(),
            row.logged.mode.to_string(),
            pages(row),
            row.tables.map_or_else(|| "-".to_owned(), |bytes| format!("{:.0}K", bytes / 1024.0)),
            populate,
            figure(row.first_touch, MS),
            figure(row.logged.write, US),
            figure(row.total, MS),
        ]
    });
    let heading = [header, units].map(|cells| cells.map(str::to_owned));
    table(heading.into_iter().chain(rows), 5)
}

/// Returns the table of logged writes: a row for each backing, a column for each mode. Without
/// another mode, the ranking already has the only column.
pub fn modes_table(ranking: &Ranking) -> Option<String> {
    let all = ranking.logged.iter().flat_map(|(_, logged)| logged);
    let mut modes: Vec<_> = all.map(|logged| logged.mode).collect();
    modes.sort_unstable();
    modes.dedup();
    if modes.len() < 2 {
        return None;
    }
    let mut header = vec!["us per logged write".to_owned()];
    header.extend(modes.iter().map(ToString::to_string));
    let rows = ranking.logged.iter().map(|(backing, logged)| {
        let mut cells = vec![backing.to_string()];
        cells.extend(modes.iter().map(|mode| {
            let found = logged.iter().find(|logged| logged.mode == *mode);
            found.map_or_else(|| "-".to_owned(), |logged| figure(logged.write, US))
        }));
        cells
    });
    Some(table(std::iter::once(header).chain(rows), 1))
}

/// Returns one sentence for each choice: backing, prefault, mode of dirty logging.
pub fn reasons(ranking: &Ranking) -> Vec<String> {
    let (Some(first), Some(last)) = (ranking.rows.first(), ranking.rows.last()) else {
        return Vec::new();
    };
    let mut reasons = vec![backing_reason(first, last)];
    let other = ranking
        .rows
        .iter()
        .find(|row| row.backing == first.backing && row.prefault != first.prefault);
    reasons.extend(other.map(|other| prefault_reason(first, other)));
    let of_backing = ranking.logged.iter().find(|(backing, _)| *backing == first.backing);
    reasons.extend(of_backing.and_then(|(_, logged)| logging_reason(logged)));
    reasons.extend(tie_reason(ranking, first));
    reasons
}

/// Returns a sentence about the ranks that the spread does not separate.
fn tie_reason(ranking: &Ranking, first: &Row) -> Option<String> {
    if first.total.half_range.is_none() {
        let reason = "A single run has no spread: raise --iterations or --time-limit.";
        return Some(reason.to_owned());
    }
    let others = ranking.rows.iter().skip(1);
    let ties = others.take_while(|row| !first.total.is_clearly_below(row.total)).count();
    let ranks = match ties {
        0 => return None,
        1 => "Ranks 1 and 2".to_owned(),
        _ => format!("Ranks 1 to {}", ties + 1),
    };
    Some(format!("{ranks} differ by less than their spread: choose among them by density."))
}

fn backing_reason(first: &Row, last: &Row) -> String {
    let page = |row: &Row| row.main_page().map_or(Bytes(0), |(page, _)| page);
    let (own, other) = (page(first), page(last));
    let ratio = last.total.median / first.total.median;
    let faults = if own > other {
        format!(": one stage-2 fault maps up to {own} instead of {other}")
    } else {
        String::new()
    };
    format!(
        "Backing {}: its total is {ratio:.1} times below that of {} with prefault {}{faults}.",
        first.backing,
        last.backing,
        if last.prefault { "on" } else { "off" }
    )
}

fn prefault_reason(first: &Row, other: &Row) -> String {
    let (with, without) = if first.prefault { (first, other) } else { (other, first) };
    let choice = if first.prefault { "on" } else { "off" };
    format!(
        "Prefault {choice}: the first touch takes {} ms/GiB with it and {} without, and populating \
         takes {} ms/GiB before the guest starts.",
        number(with.first_touch.median / MS),
        number(without.first_touch.median / MS),
        number(with.populate.median / MS)
    )
}

fn logging_reason(logged: &[LoggedWrites]) -> Option<String> {
    let (best, worst) = (logged.first()?, logged.last()?);
    if best.mode == worst.mode {
        return None;
    }
    let (low, high) = (number(best.write.median / US), number(worst.write.median / US));
    let verdict = match best.write.half_range {
        Some(_) if !best.write.is_clearly_below(worst.write) => ", a difference below the spread",
        _ => "",
    };
    Some(format!(
        "Dirty log {}: a logged write takes {low} us, and {high} us with {}{verdict}.",
        best.mode, worst.mode
    ))
}

/// Returns one line for each reason, with all configurations that it applies to.
pub fn left_out_lines(left_out: &[LeftOut]) -> Vec<String> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for LeftOut { what, reason } in left_out {
        match groups.iter_mut().find(|(known, _)| known == reason) {
            Some((_, names)) => names.push(what),
            None => groups.push((reason, vec![what])),
        }
    }
    let line = |(reason, names): &(&str, Vec<&str>)| match names.as_slice() {
        [first, rest @ ..] if !rest.is_empty() => {
            format!("{first} and {} more: {reason}", rest.len())
        }
        names => format!("{}: {reason}", names.concat()),
    };
    groups.iter().map(line).collect()
}

/// Returns the size of the pages that back a row, with their share if there are others.
fn pages(row: &Row) -> String {
    match row.main_page() {
        None => "-".to_owned(),
        Some((page, share)) if share > 0.999 => page.to_string(),
        Some((page, share)) => format!("{page} {:.0}%", share * 100.0),
    }
}

/// Formats a median in `unit` with its spread in percent.
fn figure(estimate: Estimate, unit: f64) -> String {
    let median = number(estimate.median / unit);
    match estimate.half_range.map(|half| 100.0 * half / estimate.median) {
        Some(share) if share.is_finite() => format!("{median} ±{share:.0}%"),
        _ => median,
    }
}

/// Formats a number with three significant digits, or all digits before the point.
fn number(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Aligns the cells of rows in columns: the first `left` to the left, the others to the right.
fn table<R: AsRef<[String]>>(rows: impl IntoIterator<Item = R>, left: usize) -> String {
    let rows: Vec<R> = rows.into_iter().collect();
    let columns = rows.iter().map(|row| row.as_ref().len()).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.as_ref().get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.as_ref().iter().zip(&widths).enumerate();
        let cells: Vec<String> = cells
            .map(|(column, (cell, &width))| match column < left {
                true => format!("{cell:<width$}"),
                false => format!("{cell:>width$}"),
            })
            .collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advise::rank::{
        rank,
        tests::{PAGE, runs},
    };

    #[test]
    fn the_tables_have_a_row_for_each_configuration_and_backing() {
        let ranking = rank(&runs(), PAGE);

        let rows = ranking_table(&ranking);
        let modes = modes_table(&ranking).unwrap();

        assert_eq!(rows.lines().count(), 2 + 4, "{rows}");
        let first: Vec<_> = rows.lines().nth(2).unwrap().split_whitespace().collect();
        let cells = "1 anonymous on ring 4K 2048K 5.00 ±0% 301 ±0% 2.00 ±0% 830 ±0%";
        assert_eq!(first.join(" "), cells);
        assert_eq!(
            modes,
            "us per logged write     plain      ring\n\
             anonymous            3.00 ±0%  2.00 ±0%\n\
             anonymous_thp        3.50 ±0%  4.50 ±0%\n"
        );
    }

    #[test]
    fn each_choice_has_a_sentence_with_its_figures() {
        let reasons = reasons(&rank(&runs(), PAGE));

        assert_eq!(
            reasons,
            [
                "Backing anonymous: its total is 1.7 times below that of anonymous with prefault \
                 off.",
                "Prefault on: the first touch takes 301 ms/GiB with it and 901 without, and \
                 populating takes 5.00 ms/GiB before the guest starts.",
                "Dirty log ring: a logged write takes 2.00 us, and 3.00 us with plain.",
            ]
        );
    }

    #[test]
    fn totals_within_their_spread_are_reported_as_equal() {
        let mut ranking = rank(&runs(), PAGE);
        for (half_range, expected) in [
            (Some(200e6), "Ranks 1 to 3 differ"),
            (Some(110e6), "Ranks 1 and 2 differ"),
            (None, "A single run has no spread"),
        ] {
            ranking.rows[0].total.half_range = half_range;

            let reasons = reasons(&ranking);

            assert!(reasons.last().unwrap().starts_with(expected), "{reasons:?}");
        }
    }

    #[test]
    fn configurations_left_out_for_one_reason_share_a_line() {
        let left_out = ["a", "b", "c"].map(|what| LeftOut::new(what, "time"));
        let other = LeftOut::new("hugetlb", "empty pool");

        let lines = left_out_lines(&[&left_out[..], &[other]].concat());

        assert_eq!(lines, ["a and 2 more: time", "hugetlb: empty pool"]);
    }

    #[test]
    fn numbers_have_three_significant_digits() {
        assert_eq!([0.5, 12.34, 1234.5].map(number), ["0.50", "12.3", "1234"]);
    }
}
