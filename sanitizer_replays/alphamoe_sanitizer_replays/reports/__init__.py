"""Reports of a sanitize session: a terminal's, JUnit and markdown. The JSON report is the records themselves."""
