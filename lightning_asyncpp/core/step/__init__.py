"""The user's step around ``self.model(...)``: captured, redirected, watched for what no pipeline can run."""
