"""Tell it: terminal, Markdown, HTML, JUnit and JSON outputs of a session, all made from one view of it."""
