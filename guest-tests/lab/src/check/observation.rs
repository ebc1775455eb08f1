// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Observes an emulator: reads the plugin's trace from a FIFO while the emulator runs.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    thread,
};

use flate2::{Compression, write::GzEncoder};
use granule_stage2::check::machine::{MachineAction, Observer};
use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, mknodat};

use super::{
    defect::Checked,
    places::Places,
    setup::Setup,
    trace::{Line, Parser, TraceError, place_line, setup_line},
};
use crate::command::CommandError;

/// Name of the FIFO in a job's directory.
pub const FIFO: &str = "trace.fifo";
/// Name of a kept trace in a job's directory.
pub const KEPT_TRACE: &str = "trace.gz";
/// Name of the file with the findings in a job's directory.
pub const DEFECTS: &str = "defects.jsonl";

/// Bytes that are read at once.
const BUFFER: usize = 1 << 18;

/// A check of a trace that is read line by line.
#[derive(Debug)]
pub struct Check<'a> {
    setup: Setup,
    observer: Observer,
    parser: Parser,
    places: &'a Places,
    /// Places of the instructions of all call stacks.
    known_places: BTreeMap<u64, String>,
    /// Innermost instruction of each call stack.
    innermost: BTreeMap<u32, u64>,
}

impl<'a> Check<'a> {
    /// Returns a check of a machine.
    pub fn new(setup: Setup, places: &'a Places) -> Self {
        Self {
            observer: Observer::new(setup.machine()),
            setup,
            parser: Parser::default(),
            places,
            known_places: BTreeMap::new(),
            innermost: BTreeMap::new(),
        }
    }

    /// Checks a line. Returns the comments that belong behind it in a kept trace.
    pub fn line(&mut self, text: &str) -> Result<Option<String>, TraceError> {
        let is_first = self.parser.is_at_start();
        match self.parser.line(text)? {
            Line::Event(event) => {
                if event.cpu >= self.setup.cpus {
                    let reason = format!("CPU {} of {}", event.cpu, self.setup.cpus);
                    return Err(self.parser.misfit(text, reason));
                }
                self.observer.observe(&event);
                if let MachineAction::Stack(number, addresses) = &event.action {
                    return Ok(Some(self.add_stack(*number, addresses)));
                }
            }
            Line::Place(address, place) => {
                self.known_places.entry(address).or_insert(place);
            }
            Line::Setup(_) => {}
            Line::Comment if is_first => return Ok(Some(setup_line(&self.setup))),
            Line::Comment => {}
        }
        Ok(None)
    }

    /// Adds the places of a call stack; returns their lines.
    fn add_stack(&mut self, number: u32, addresses: &[u64]) -> String {
        let mut lines = String::new();
        self.innermost.extend(addresses.first().map(|address| (number, *address)));
        for (depth, address) in addresses.iter().enumerate() {
            if !self.known_places.contains_key(address)
                && let Some(place) = self.places.describe(*address, depth > 0)
            {
                lines += &place_line(*address, &place);
                self.known_places.insert(*address, place);
            }
        }
        lines
    }

    /// Checks that the trace is complete.
    pub fn complete(&self) -> Result<(), TraceError> {
        self.parser.finish()
    }

    /// Ends the check. `error` is the reason for which the trace was not read to its end.
    pub fn finish(self, error: Option<TraceError>) -> Checked {
        let error = error.or_else(|| self.parser.finish().err());
        Checked::new(
            (self.observer.totals(), &self.observer.findings()),
            &self.setup,
            error.map(|error| error.to_string()),
            |address| self.known_places.get(&address).cloned(),
            |number| self.innermost.get(&number).copied(),
        )
    }
}

/// Runs an emulator whose plugin writes its trace to the FIFO in `directory`, and checks the trace;
/// writes the findings and, if `keeps_trace`, the trace to the directory. Returns the result of the
/// emulator.
///
/// # Errors
/// A file cannot be written.
pub fn observe<T>(
    mut check: Check<'_>,
    directory: &Path,
    keeps_trace: bool,
    run: impl FnOnce() -> T,
) -> Result<T, CommandError> {
    let path = directory.join(FIFO);
    let failed = |error| CommandError::file("read the trace from", &path, error);
    let (reader, writer) = open_fifo(&path).map_err(failed)?;
    let kept_path = keeps_trace.then(|| directory.join(KEPT_TRACE));
    let mut kept = kept_path.as_ref().map(KeptTrace::create).transpose()?;
    let (result, ended) = thread::scope(|scope| {
        let checker = scope.spawn(|| read_all(reader, &mut check, kept.as_mut()));
        let result = run();
        // The reader reaches the end once this writer is closed too, even if no emulator started.
        drop(writer);
        (result, checker.join())
    });
    let _ = fs::remove_file(&path);
    let panicked = |_| CommandError::file("check", &path, io::Error::other("the checker failed"));
    let error = ended.map_err(panicked)?.map_err(failed)?;
    if let Some(kept) = kept {
        kept.finish()?;
    }
    check.finish(error).write(&directory.join(DEFECTS))?;
    Ok(result)
}

/// Creates a FIFO and opens both ends: a reader does not wait for a writer that never starts.
fn open_fifo(path: &Path) -> io::Result<(File, File)> {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let non_blocking = OFlags::NONBLOCK.bits().cast_signed();
    let reader = OpenOptions::new().read(true).custom_flags(non_blocking).open(path)?;
    let writer = OpenOptions::new().write(true).open(path)?;
    fcntl_setfl(&reader, fcntl_getfl(&reader)? - OFlags::NONBLOCK)?;
    Ok((reader, writer))
}

/// Checks all lines. After an unusable line the rest is read, so that the emulator continues.
fn read_all(
    reader: File,
    check: &mut Check<'_>,
    mut kept: Option<&mut KeptTrace>,
) -> io::Result<Option<TraceError>> {
    let mut reader = BufReader::with_capacity(BUFFER, reader);
    let mut line = String::new();
    let mut error = None;
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(error);
        }
        let comments = match error {
            None => check.line(&line).unwrap_or_else(|refused| {
                error = Some(refused);
                None
            }),
            Some(_) => None,
        };
        if let Some(kept) = &mut kept {
            kept.write(&line, comments.as_deref().unwrap_or_default());
        }
    }
}

/// A compressed trace that is being written. The first error ends the output.
struct KeptTrace {
    path: PathBuf,
    out: GzEncoder<BufWriter<File>>,
    error: Option<io::Error>,
}

impl KeptTrace {
    fn create(path: &PathBuf) -> Result<Self, CommandError> {
        let file = File::create(path).map_err(|error| CommandError::file("write", path, error))?;
        let out = GzEncoder::new(BufWriter::new(file), Compression::fast());
        Ok(Self { path: path.clone(), out, error: None })
    }

    fn write(&mut self, line: &str, comments: &str) {
        if self.error.is_none() {
            let written = self.out.write_all(line.as_bytes());
            self.error = written.and_then(|()| self.out.write_all(comments.as_bytes())).err();
        }
    }

    fn finish(self) -> Result<(), CommandError> {
        let Self { path, out, error } = self;
        let finished = match error {
            Some(error) => Err(error),
            None => out.finish().and_then(|mut out| out.flush()),
        };
        finished.map_err(|error| CommandError::file("write", path, error))
    }
}

#[cfg(test)]
mod tests {
    use granule_stage2::check::machine::event::HEADER;

    use super::{super::setup::tests::setup, *};
    use crate::check::replay::read_trace;

    const EVENTS: &str = "0 stack 1 ffff800010001000\n0 isb\n";

    fn places() -> Places {
        Places::of_system_map("ffff800010001000 t kvm_vm_ioctl\n")
    }

    fn observe_text(directory: &Path, text: &str) -> Checked {
        let places = places();
        let write = || fs::write(directory.join(FIFO), text).unwrap();

        observe(Check::new(setup(), &places), directory, true, write).unwrap();

        Checked::read(&directory.join(DEFECTS)).unwrap()
    }

    #[test]
    fn a_kept_trace_contains_setup_and_places() {
        let directory = tempfile::tempdir().unwrap();
        let text = format!("{HEADER}\n{EVENTS}# end events=2 skipped=\n");

        let checked = observe_text(directory.path(), &text);

        assert_eq!((checked.summary.error, checked.summary.events), (None, 2));
        let mut lines = Vec::new();
        read_trace(&directory.path().join(KEPT_TRACE), |line| {
            lines.push(line.to_owned());
            Ok(())
        })
        .unwrap();
        assert_eq!(lines[1].trim_end(), setup_line(&setup()).trim_end());
        assert_eq!(lines[3].trim_end(), "# place ffff800010001000 kvm_vm_ioctl+0x0");
        assert!(!directory.path().join(FIFO).exists());
    }

    #[test]
    fn a_malformed_line_does_not_block_the_emulator() {
        let directory = tempfile::tempdir().unwrap();
        let text = format!("{HEADER}\nx\n{}", "0 isb\n".repeat(100_000));

        let checked = observe_text(directory.path(), &text);

        assert!(checked.summary.error.unwrap().contains("line 2 is no event"));
    }

    #[test]
    fn an_emulator_that_does_not_start_leaves_no_trace() {
        let directory = tempfile::tempdir().unwrap();
        let places = places();

        observe(Check::new(setup(), &places), directory.path(), false, || {}).unwrap();

        let checked = Checked::read(&directory.path().join(DEFECTS)).unwrap();
        assert!(checked.summary.error.is_some());
    }
}
