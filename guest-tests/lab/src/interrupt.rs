// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SIGINT and SIGTERM: terminates the programs of the run, and prints how to continue it.

use std::{
    io,
    path::Path,
    process,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};

use crate::{command::quote, running_program::terminate_all};

/// Maximum time from a signal to the start of its handler.
const HANDLER_DELAY: Duration = Duration::from_millis(100);

static HAS_HANDLER: AtomicBool = AtomicBool::new(false);
static IS_ENDING: AtomicBool = AtomicBool::new(false);
static MESSAGE: Mutex<Option<String>> = Mutex::new(None);

/// Sets the message of an interruption of a run, which `granule COMMAND` continues. `remark` states
/// what continues without this process.
pub(crate) fn set_run_directory(command: &str, path: &Path, remark: &str) {
    let path = quote(path);
    set_message(format!(
        "interrupted{remark}; to continue: granule {command} --out {path} --resume"
    ));
}

/// Sets the message of an interruption.
pub(crate) fn set_message(message: String) {
    *MESSAGE.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
}

/// Waits for the end of the process if a signal ends it: a program that the signal terminated is no
/// error to print.
pub fn wait_if_ending() {
    // The signal of a terminal reaches the program too, maybe before the handler of this process.
    if HAS_HANDLER.load(Ordering::SeqCst) {
        thread::sleep(HANDLER_DELAY);
    }
    while IS_ENDING.load(Ordering::SeqCst) {
        thread::park();
    }
}

/// Terminates running programs and prints a message when a signal ends this process.
///
/// # Errors
/// The signals cannot be handled.
pub fn announce_resume() -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    HAS_HANDLER.store(true, Ordering::SeqCst);
    thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        IS_ENDING.store(true, Ordering::SeqCst);
        // A terminal signals its whole process group; `kill` and a service manager may not.
        let _no_start = terminate_all();
        if let Some(message) = &*MESSAGE.lock().unwrap_or_else(PoisonError::into_inner) {
            eprintln!("\nlab: {message}");
        }
        // Ends the process by the signal, as without this handler.
        let _ = emulate_default_handler(signal);
        process::exit(2);
    });
    Ok(())
}
