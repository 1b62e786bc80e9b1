//! Tests of a conversation of `hearth run` on a terminal.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::process::{hearth, model};

/// Longest wait before a test fails; far longer than needed.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A program on a terminal of its own; killed when dropped.
struct Terminal {
    keyboard: File,
    screen: Receiver<String>,
    /// Everything on the screen so far.
    shown: String,
    child: Child,
}

impl Terminal {
    /// Starts the executable; it keeps messages below `state`.
    fn start(args: &[&str], state: &Path) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let slave = || File::from(rustix::fs::open(&name, flags, Mode::empty()).unwrap());
        // The program opens its controlling terminal.
        let mut command = Command::new("setsid");
        command
            .arg("--ctty")
            .arg(env!("CARGO_BIN_EXE_hearth"))
            .args(args)
            .env("TERM", "xterm")
            .env("XDG_STATE_HOME", state)
            .stdin(slave())
            .stdout(slave())
            .stderr(slave());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HEARTH_") {
                command.env_remove(name);
            }
        }
        let child = command.spawn().unwrap();
        let keyboard = File::from(master);
        let mut output = keyboard.try_clone().unwrap();
        let (sender, screen) = mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The last program on the terminal has ended when reading fails.
            while let Ok(n @ 1..) = output.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..n]).into_owned();
                if sender.send(text).is_err() {
                    return;
                }
            }
        });
        Terminal {
            keyboard,
            screen,
            shown: String::new(),
            child,
        }
    }

    /// Waits until the screen had `part` this many times.
    fn wait_for(&mut self, part: &str, times: usize) {
        while self.shown.matches(part).count() < times {
            match self.screen.recv_timeout(TIMEOUT) {
                Ok(text) => self.shown.push_str(&text),
                Err(error) => panic!("{part:?} x {times}, {error}:\n{}", self.shown),
            }
        }
    }

    fn type_keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the exit code; the screen is complete then.
    fn end(&mut self) -> Option<i32> {
        let status = self.child.wait().unwrap();
        while let Ok(text) = self.screen.recv_timeout(Duration::from_secs(5)) {
            self.shown.push_str(&text);
        }
        status.code()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It has exited already if the test succeeded.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn pasted_lines_are_one_message_and_empty_lines_do_nothing() {
    let model = model();
    let flags = [
        "run",
        model.to_str().unwrap(),
        "-n",
        "4",
        "--max-ctx",
        "1024",
    ];
    let text = "first line\nsecond line\n\nlast line";
    let once = hearth(&[&flags[..2], &[text], &flags[2..]].concat());
    let size = once.err.split("prompt tokens").next().unwrap();
    let size = format!("[{} prompt tokens", size.rsplit('[').next().unwrap().trim());

    let state = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::start(&flags, state.path());
    // The editor marks that it takes pasted text as such.
    terminal.wait_for("\x1b[?2004h", 1);
    terminal.type_keys(&format!("\x1b[200~{text}\x1b[201~"));
    terminal.type_keys("\r");
    terminal.wait_for("prompt tokens", 1);
    assert!(
        terminal.shown.contains(&size),
        "{size} in {}",
        terminal.shown
    );
    terminal.wait_for("\x1b[?2004h", 2);
    terminal.type_keys("\r");
    terminal.wait_for("\x1b[?2004h", 3);
    terminal.type_keys("  \r");
    terminal.wait_for("\x1b[?2004h", 4);
    terminal.type_keys("again\r");
    terminal.wait_for("prompt tokens", 2);
    terminal.wait_for("\x1b[?2004h", 5);
    terminal.type_keys("\x04");
    assert_eq!(terminal.end(), Some(0), "{}", terminal.shown);
    assert_eq!(terminal.shown.matches("prompt tokens").count(), 2);
}

#[test]
fn ctrl_c_between_replies_ends_the_conversation() {
    let model = model();
    let state = tempfile::tempdir().unwrap();
    let args = ["run", model.to_str().unwrap(), "--max-ctx", "1024"];
    let mut terminal = Terminal::start(&args, state.path());
    terminal.wait_for("\x1b[?2004h", 1);
    terminal.type_keys("half a mess");
    terminal.type_keys("\x03");
    assert_eq!(terminal.end(), Some(0), "{}", terminal.shown);
    assert_eq!(terminal.shown.matches("prompt tokens").count(), 0);
}

#[test]
fn commands_set_options_and_save_the_conversation_and_messages_are_kept() {
    let model = model();
    let state = tempfile::tempdir().unwrap();
    let file = state.path().join("chat.json");
    let args = ["run", model.to_str().unwrap(), "--max-ctx", "1024"];
    let mut terminal = Terminal::start(&args, state.path());
    terminal.wait_for("/help lists the commands", 1);
    terminal.wait_for("\x1b[?2004h", 1);
    let save = format!("/save {}", file.display());
    for (line, answer) in [
        ("/set max_tokens 3", "\x1b[?2004h"),
        ("/set", "max_tokens   3"),
        // Tab completes the command.
        ("/hel\t", "Ctrl-C ends a reply"),
        ("Hello \\\rthere", "prompt tokens"),
        (&save, "saved 2 messages"),
        ("/nonsense", "unknown command"),
    ] {
        let times = terminal.shown.matches(answer).count();
        let prompts = terminal.shown.matches("\x1b[?2004h").count();
        terminal.type_keys(line);
        terminal.type_keys("\r");
        terminal.wait_for(answer, times + 1);
        terminal.wait_for("\x1b[?2004h", prompts + 1);
    }
    terminal.type_keys("/bye\r");
    assert_eq!(terminal.end(), Some(0), "{}", terminal.shown);
    let saved = std::fs::read_to_string(&file).unwrap();
    assert!(saved.contains("Hello \\nthere"), "{saved}");
    let kept = state.path().join("hearth/messages");
    let mode = std::fs::metadata(&kept).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "only the user can read what was typed");
    let mut again = Terminal::start(&args, state.path());
    again.wait_for("\x1b[?2004h", 1);
    // The arrow key brings the last message back, which ends this conversation too.
    again.type_keys("\x1b[A");
    again.wait_for("/bye", 1);
    again.type_keys("\r");
    assert_eq!(again.end(), Some(0), "{}", again.shown);
}
