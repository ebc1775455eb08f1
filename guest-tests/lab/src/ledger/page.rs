// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page of a ledger: a chart, a table of each configuration, and the setups.
//!
//! A Markdown page refers to its chart, a file beside it. In an existing Markdown page, the part
//! between two marks is replaced, so a document may contain other text.

use std::{
    fs,
    path::{Path, PathBuf},
};

use granule_report::render::page::{self, escape_html};
use granule_types::units::pluralize;

use super::{
    chart::chart,
    figures::{FIGURES, Row, configurations, label, rows},
    line::{Line, Outcome},
};
use crate::{
    error::LabError,
    shell::{Shell, absolute},
};

const BEGIN: &str = "<!-- granule ledger: begin of the generated part -->\n";
const END: &str = "<!-- granule ledger: end of the generated part -->\n";
/// Start of a chart that a ledger may replace.
const CHART_MARK: &str = "<!-- granule ledger -->\n";
/// Number of rows of a table.
const MAX_ROWS: usize = 10;

/// Format of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Markdown,
    Html,
}

/// File of a page.
#[derive(Debug)]
pub struct PageFile {
    path: PathBuf,
    format: Format,
}

impl PageFile {
    /// Refuses the ledger itself, and an existing file that is no page of a ledger.
    pub fn open(path: &Path, ledger: &Path) -> Result<Self, LabError> {
        let path = absolute(path)?;
        let refuse =
            |reason: &str| Err(LabError::Unusable(format!("--page {}: {reason}", path.display())));
        let format = match path.extension().and_then(|ending| ending.to_str()) {
            Some("md") => Format::Markdown,
            Some("html") => Format::Html,
            _ => return refuse("the name of a page ends with .md or .html"),
        };
        let page = Self { path: path.clone(), format };
        for file in page.files() {
            let canonical =
                |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            if canonical(&file) == canonical(ledger) {
                return refuse("it is the ledger: set another file");
            }
        }
        if !path.parent().is_some_and(Path::is_dir) {
            return refuse("its directory does not exist: create it");
        }
        let is_foreign = |path: &Path, mark: &str| {
            path.exists() && !fs::read_to_string(path).is_ok_and(|text| text.contains(mark))
        };
        if is_foreign(&path, BEGIN) || is_foreign(&path, END) {
            return refuse(&format!(
                "the file exists and is no page of a ledger: set another file, or add the lines \
                 '{}' and '{}'",
                BEGIN.trim_end(),
                END.trim_end()
            ));
        }
        if format == Format::Markdown && is_foreign(&page.chart_path(), CHART_MARK) {
            let chart = page.chart_path();
            return refuse(&format!("its chart would replace {}: rename it", chart.display()));
        }
        Ok(page)
    }

    fn chart_path(&self) -> PathBuf {
        self.path.with_extension("svg")
    }

    fn files(&self) -> Vec<PathBuf> {
        match self.format {
            Format::Markdown => vec![self.path.clone(), self.chart_path()],
            Format::Html => vec![self.path.clone()],
        }
    }

    /// Writes the page of the lines, in their order.
    pub fn write(&self, lines: &[&Line]) -> Result<(), LabError> {
        let body = match self.format {
            Format::Markdown => {
                Shell::new(false)
                    .replace(&self.chart_path(), format!("{CHART_MARK}{}", chart(lines)))?;
                let chart = self.chart_path();
                let name = chart.file_name().unwrap_or_default().to_string_lossy();
                let text = "Figures of each kernel, relative to the first of its setup";
                format!("![{text}]({name})\n\n{}", markdown(lines))
            }
            Format::Html => format!("{}{}", chart(lines), html(lines)),
        };
        let generated = format!("{BEGIN}\n{body}\n{END}");
        let text = match (self.format, fs::read_to_string(&self.path)) {
            (Format::Html, _) => page::page("Ledger", &generated),
            (Format::Markdown, Ok(text)) => replace_part(&text, &generated),
            (Format::Markdown, Err(_)) => format!("# Ledger\n\n{generated}"),
        };
        Ok(Shell::new(false).replace(&self.path, text)?)
    }
}

/// Replaces the part between the marks.
fn replace_part(text: &str, generated: &str) -> String {
    let begin = text.find(BEGIN).unwrap_or(text.len());
    let end = text.find(END).map_or(text.len(), |at| at + END.len());
    format!("{}{generated}{}", &text[..begin], &text[end.max(begin)..])
}

/// A table: its title, its headings, and the cells of its rows.
type Table = (String, Vec<&'static str>, Vec<Vec<String>>);

/// Returns a table for each configuration, with the last rows.
fn tables(lines: &[&Line]) -> Vec<Table> {
    let table = |configuration: &super::line::ConfigurationFigures| {
        let rows = rows(lines, configuration);
        let hidden = rows.len().saturating_sub(MAX_ROWS);
        let cells = |index: usize, row: &Row<'_>| {
            let before = index.checked_sub(1).map(|before| &rows[before]);
            let cells = FIGURES.iter().map(|figure| row.cell(figure, before));
            std::iter::once(row.label()).chain(cells).collect::<Vec<_>>()
        };
        let cells = rows.iter().enumerate().skip(hidden).map(|(index, row)| cells(index, row));
        let title = match hidden {
            0 => configuration.title(),
            _ => {
                format!("{}: the last {MAX_ROWS} of {} kernels", configuration.title(), rows.len())
            }
        };
        let headings = FIGURES.iter().map(|figure| figure.heading);
        (title, std::iter::once("Linux").chain(headings).collect(), cells.collect())
    };
    configurations(lines).into_iter().map(table).collect()
}

/// Returns a sentence for each kernel without figures and for each setup.
fn remarks(lines: &[&Line]) -> Vec<String> {
    let mut remarks = Vec::new();
    let mut setups: Vec<(&Line, Vec<String>)> = Vec::new();
    for line in lines {
        if let Outcome::Failure(reason) = &line.outcome {
            remarks.push(format!("No figures of {}: {reason}.", label(line)));
        }
        match setups.iter_mut().find(|(of, _)| of.key.has_same_setup(&line.key)) {
            Some((_, labels)) => labels.push(label(line)),
            None => setups.push((line, vec![label(line)])),
        }
    }
    let several = setups.len() > 1;
    for (line, labels) in setups {
        let key = &line.key;
        let mut machines: Vec<&str> = key.machines.iter().map(String::as_str).collect();
        machines.dedup();
        let machine = match machines.as_slice() {
            [] => String::new(),
            [machine] => (*machine).to_owned(),
            [machine, rest @ ..] => {
                format!("{machine} (and {} of other sizes)", pluralize(rest.len(), "host"))
            }
        };
        let of = if several { format!("Setup of {}", labels.join(", ")) } else { "Setup".into() };
        remarks.push(format!(
            "{of}: matrix {}; {}; configuration {}; {} {machine}; Granule {}, programs {}.",
            key.matrix, key.compiler, key.configuration, key.emulator, line.granule, key.program
        ));
    }
    remarks
}

fn markdown(lines: &[&Line]) -> String {
    let mut text = String::new();
    for (title, headings, rows) in tables(lines) {
        let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let headings: Vec<String> = headings.iter().map(|heading| (*heading).to_owned()).collect();
        text +=
            &format!("**{title}**\n\n{}|---{}|\n", row(&headings), "|--:".repeat(FIGURES.len()));
        text.extend(rows.iter().map(|cells| {
            row(&cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>())
        }));
        text.push('\n');
    }
    text + &remarks(lines).join("\n\n") + "\n"
}

fn html(lines: &[&Line]) -> String {
    let mut text = String::new();
    for (title, headings, rows) in tables(lines) {
        let rows: Vec<Vec<String>> =
            rows.iter().map(|cells| cells.iter().map(|cell| escape_html(cell)).collect()).collect();
        text += &format!("<h2>{}</h2>\n{}", escape_html(&title), page::table(&headings, &rows));
    }
    for remark in remarks(lines) {
        text += &format!("<p>{}</p>\n", escape_html(&remark));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{super::line::tests::line, *};

    #[test]
    fn a_table_has_the_last_rows_and_their_changes() {
        let lines: Vec<Line> =
            (1..=12).map(|index: u32| line(&format!("6.{index}.0"), u64::from(index))).collect();

        let text = markdown(&lines.iter().collect::<Vec<_>>());

        assert!(text.contains("the last 10 of 12 kernels"), "{text}");
        assert!(!text.contains("| 6.2.0 |") && text.contains("| 6.3.0 | 6 (+50.0%) |"), "{text}");
        assert_eq!(text.matches("Setup: matrix 1; gcc;").count(), 1);
    }

    #[test]
    fn a_kernel_without_figures_and_another_setup_are_named() {
        let (first, mut failed, mut other) =
            (line("6.1.2", 7), line("6.5.0", 7), line("6.12.1", 7));
        failed.outcome = Outcome::Failure("does not build: x.c: error".to_owned());
        other.key.compiler = "clang".to_owned();

        let text = markdown(&[&first, &failed, &other]);

        assert!(text.contains("No figures of 6.5.0: does not build: x.c: error.\n"), "{text}");
        assert!(text.contains("Setup of 6.1.2, 6.5.0: matrix 1; gcc"), "{text}");
        assert!(text.contains("| 6.12.1 | 14 | 14 |"), "{text}");
    }

    #[test]
    fn a_page_replaces_its_own_part_only() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let ledger = path("ledger.jsonl");
        fs::write(&ledger, "").unwrap();
        fs::write(path("page.md"), format!("# Mine\n\n{BEGIN}old\n{END}\nend\n")).unwrap();
        let one = line("6.1.2", 7);
        for name in ["page.md", "new.md", "new.html"] {
            for _ in 0..2 {
                PageFile::open(&path(name), &ledger).unwrap().write(&[&one]).unwrap();
            }
            let text = fs::read_to_string(path(name)).unwrap();
            assert_eq!(text.matches(BEGIN).count(), 1, "{text}");
            assert!(text.contains("6.1.2") && !text.contains("old"), "{text}");
        }

        let text = fs::read_to_string(path("page.md")).unwrap();

        assert!(text.starts_with("# Mine\n") && text.ends_with(&format!("{END}\nend\n")), "{text}");
        assert!(path("page.svg").is_file() && !path("new.html.partial").exists());
    }

    #[test]
    fn other_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["ledger.md", "notes.md", "own.svg"] {
            fs::write(path(name), "text").unwrap();
        }
        for (name, reason) in [
            ("ledger.md", "it is the ledger"),
            ("notes.md", "no page of a ledger"),
            ("own.md", "its chart would replace"),
            ("page.txt", "ends with .md or .html"),
            ("no/page.md", "does not exist"),
        ] {
            let error = PageFile::open(&path(name), &path("ledger.md")).unwrap_err().to_string();

            assert!(error.contains(reason), "{name}: {error}");
        }
    }
}
